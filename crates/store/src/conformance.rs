//! Conformance: what every store must do.
//!
//! A scenario is a [`Diary`]: one command a line, what came of it in the last column, under a clock that only the
//! diary moves. [`conformance_tests!`](crate::conformance_tests) makes a test of each for one [`Harness`], so every
//! store passes the same ones; each test ends by verifying the store and by the [`laws`] that any history obeys.
//!
//! Histories that nobody thought of come from [`invent`]: the same verbs, put together at random, run on two
//! stores whose answers and [`dump`]s must be equal. A failing one is a diary and can be kept as a scenario.
//!
//! A new kind of command joins by one entry in [`verbs`].

mod diary;
mod laws;
pub mod verbs;

mod admission;
mod claim;
mod commit;
mod control;
mod faults;
mod heartbeat;
mod reading;
mod signals;
mod sweep;

use std::fmt;
use std::sync::Arc;

use steadfast_core::command::{Command, Moment, Outcome, decide};
use steadfast_core::snapshot::{Snapshot, Stop, Wants};

pub use diary::{DAY_ONE, Diary};
pub use laws::{dump, laws};
pub use verbs::{Dice, invent};

use crate::clock::Clock;
use crate::contract::{Saved, Store, StoreError, Writer};

/// How often a batch may lose a race before that is its outcome.
const RACES_MAX: usize = 8;

/// Makes the stores of one kind that a diary is told on.
pub trait Harness {
    /// Hands out the store: empty the first time, afterwards what its last owner left, under a new owner.
    ///
    /// `restored`: as if from a backup that was made when that owner let go. Every handle of the last owner is gone
    /// by then.
    fn open(&mut self, clock: Arc<dyn Clock>, restored: bool) -> Box<dyn Store>;
}

/// What became of a batch of commands.
#[derive(Debug)]
pub enum Applied {
    /// Saved, with an outcome for each command.
    Committed(Vec<Outcome>),
    /// There was nothing to save.
    Unchanged(Vec<Outcome>),
    /// Certainly without a trace.
    NotCommitted(StoreError),
    /// It may be there or not. The writer is to recover before anything else.
    Unknown(StoreError),
}

/// Takes one batch down the road of every change, as a committer does: load what the commands want, decide each in
/// order, save the difference, make it durable. What turns out to rest on something that has changed is decided anew.
///
/// # Panics
/// If a rule writes an event where none may stand.
pub fn apply(writer: &mut dyn Writer, moment: &Moment, commands: &[Command]) -> Applied {
    for _ in 0..RACES_MAX {
        let applied = apply_once(writer, moment, commands);
        if !matches!(applied, Applied::NotCommitted(StoreError::Raced { .. })) {
            return applied;
        }
    }
    apply_once(writer, moment, commands)
}

fn apply_once(writer: &mut dyn Writer, moment: &Moment, commands: &[Command]) -> Applied {
    let mut wants = Wants::default();
    commands.iter().for_each(|command| command.wants(moment, &mut wants));
    let mut snapshot = Snapshot::new();
    let outcomes = match decide_all(writer, moment, commands, &wants, &mut snapshot) {
        Ok(outcomes) => outcomes,
        Err(error) => {
            writer.abandon();
            return Applied::NotCommitted(error);
        }
    };
    if !snapshot.is_changed() {
        return match writer.confirm() {
            Ok(()) => Applied::Unchanged(outcomes),
            Err(error) => Applied::NotCommitted(error),
        };
    }
    match writer.save(&snapshot) {
        Saved::Written => match writer.disk().sync() {
            Ok(()) => Applied::Committed(outcomes),
            Err(error) => Applied::Unknown(error),
        },
        Saved::NotCommitted(error) => Applied::NotCommitted(error),
        Saved::Unknown(error) => Applied::Unknown(error),
    }
}

fn decide_all(
    writer: &mut dyn Writer,
    moment: &Moment,
    commands: &[Command],
    wants: &Wants,
    snapshot: &mut Snapshot,
) -> Result<Vec<Outcome>, StoreError> {
    writer.load(wants, snapshot)?;
    let mut outcomes = Vec::with_capacity(commands.len());
    for command in commands {
        outcomes.push(loop {
            match decide(snapshot, command, moment) {
                Ok(outcome) => break outcome,
                Err(Stop::Missing(wants)) => writer.load(&wants, snapshot)?,
                Err(Stop::Illegal(illegal)) => panic!("{command:?}: {illegal}"),
            }
        });
    }
    Ok(outcomes)
}

/// One scenario.
#[derive(Clone, Copy)]
pub struct Scenario {
    /// Stage and rule, `commit::a_late_commit_writes_nothing`.
    pub name: &'static str,
    /// Tells it.
    pub tell: fn(&mut Diary),
}

impl fmt::Debug for Scenario {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl Scenario {
    /// Tells it on a new store, then verifies that store and checks the laws.
    pub fn run(&self, harness: impl Harness + 'static) {
        let mut diary = Diary::begin(Box::new(harness));
        (self.tell)(&mut diary);
        diary.end();
    }
}

/// Lists the scenarios by stage and makes the macro that turns each into a test.
macro_rules! scenarios {
    (($d:tt) $($stage:ident { $($rule:ident)* })*) => {
        /// Every scenario, in the order of the stages.
        pub const SCENARIOS: &[Scenario] = &[
            $($(Scenario { name: concat!(stringify!($stage), "::", stringify!($rule)), tell: $stage::$rule },)*)*
        ];

        /// Makes one test of each scenario, on stores of the [`Harness`](crate::conformance::Harness) that the given
        /// expression makes. The expression is used inside modules: name it by its path from the crate.
        #[macro_export]
        macro_rules! conformance_tests {
            ($d harness:expr) => {
                $(mod $stage {
                    $(#[test] fn $rule() {
                        let name = concat!(stringify!($stage), "::", stringify!($rule));
                        let all = $d crate::conformance::SCENARIOS;
                        all.iter().find(|scenario| scenario.name == name).expect("it is listed").run($d harness);
                    })*
                })*
            };
        }
    };
}

scenarios! { ($)
    admission {
        a_repeated_start_is_a_replay
        another_request_under_the_same_id_is_a_conflict
        starts_of_one_id_in_one_batch
        a_start_may_claim_its_first_step
        receipts_survive_reopening
        initial_variables_and_input
        ids_of_two_namespaces_do_not_meet
    }
    claim {
        in_order_of_time
        in_order_of_priority_and_time
        what_becomes_ready_in_the_batch_is_claimed_in_its_place
        a_worker_gets_only_steps_it_announced
        two_claims_of_one_batch_never_share
        a_page_that_others_took_is_read_on
        a_repeated_call_brings_the_same_claims
        a_repeated_call_leaves_out_what_is_over
        a_repeated_call_after_a_restore_brings_nothing
        a_call_is_remembered_for_a_day
        namespaces_do_not_see_each_other
        request_ids_of_two_namespaces_do_not_meet
    }
    commit {
        a_workflow_from_start_to_end
        ten_steps_cost_eleven_commits
        the_next_step_is_claimed_only_if_due_and_known
        a_repeated_commit_is_already_committed
        a_repeated_sleep_is_already_committed
        a_repeated_end_is_already_committed
        a_repeated_commit_with_unset_keys_is_already_committed
        a_repeated_failure_is_already_committed
        a_repeated_commit_learns_its_own_next_claim_and_no_other
        another_token_or_content_has_lost
        a_late_commit_writes_nothing
        a_restore_voids_every_claim
        an_expired_lease_still_commits
        unset_removes_and_null_is_a_value
        writes_of_failed_attempts_vanish
        values_are_kept_byte_for_byte
        a_sleep_ends_at_its_time_and_no_earlier
        a_sleep_into_the_past_is_none
        failed_attempts_back_off
        a_failure_may_name_its_own_delay
        exhausted_attempts_end_the_workflow_in_the_same_commit
        a_final_failure_ends_the_workflow_in_the_same_commit
        a_step_may_have_its_own_policy
        a_returned_step_costs_a_delivery_and_no_attempt
    }
    heartbeat {
        it_extends_the_lease_and_never_shortens_it
        a_beat_without_a_claim_is_lost
        progress_is_kept_until_the_next
        it_does_not_move_the_step_timeout
    }
    signals {
        a_signal_wakes_who_waits_for_it
        a_signal_before_the_wait_is_there_when_it_begins
        of_several_names_the_first_accepted_counts
        many_signals_of_a_name_are_taken_in_their_order
        signals_and_waits_of_one_batch
        a_repeated_signal_is_a_replay
        a_finished_workflow_takes_no_signal_and_keeps_those_it_had
        a_wait_may_have_a_timeout
        a_signal_that_comes_late_but_before_the_sweep_wins
        a_wait_that_has_everything_at_once
        a_repeated_wait_is_already_committed
        cancel_ends_a_wait
        waits_survive_reopening_and_restores
        a_signal_of_unknown_outcome
    }
    control {
        cancel_in_every_live_state
        cancel_of_what_is_over_or_unknown
        cancel_and_commit_in_one_batch
    }
    sweep {
        a_lost_lease_costs_a_delivery_and_no_attempt
        twenty_lost_deliveries_end_the_workflow
        a_step_timeout_costs_an_attempt
        a_lease_that_lives_is_looked_at_once_a_lease
        live_leases_do_not_hide_an_expired_one
        a_page_at_a_time_in_order_of_time
        it_leaves_alone_what_committed_in_the_same_batch
        two_sweeps_of_one_batch
        a_new_owner_gives_back_what_dead_workers_held
        a_restored_store_gives_back_every_claim
        giving_back_pages_through_all_claims
        giving_back_in_two_namespaces
        orphaned_claims_are_given_back
    }
    reading {
        events_in_pages
        variables_in_pages
        lists_in_pages_newest_first
        lists_by_name_and_status
        the_next_due_time
        nothing_there
    }
    faults {
        a_failed_load_leaves_no_trace
        a_failed_save_leaves_no_trace
        a_start_of_unknown_outcome
        a_failed_sync_is_unknown
        a_commit_of_unknown_outcome
        a_claim_of_unknown_outcome
        as_many_writers_as_the_store_says
    }
}
