//! Rules that need no store: what is refused before anything is sent, and what a decision leaves in its snapshot.

use std::sync::Arc;

use steadfast_core::claim::{Announced, CallId, Held, Request, Steps, Terms};
use steadfast_core::command::{Command, Lane, Moment, Outcome, decide};
use steadfast_core::commit::{self, Complete, Continuation, Fail, FailKind, When};
use steadfast_core::event::{Event, Writes};
use steadfast_core::fingerprint::FingerprintKey;
use steadfast_core::head::{Token, WorkerRef};
use steadfast_core::heartbeat::{self, Beat};
use steadfast_core::json::Json;
use steadfast_core::limits::Limits;
use steadfast_core::options::{Options, StartOptions};
use steadfast_core::snapshot::{HeadChange, Snapshot, Stop};
use steadfast_core::text::{FailureCode, Key, Name, Namespace, Step, Tag, WorkflowId, WorkflowKey};
use steadfast_core::{admission, control, sweep};

const NOW: Moment = Moment { now: 1_000_000, epoch: 1 };
const SEED: [u8; 32] = [7; 32];

fn key() -> WorkflowKey {
    WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted("w1") }
}

fn asked() -> admission::Asked {
    admission::Asked {
        key: key(),
        name: Name::trusted("flow"),
        input: Json::null(),
        writes: Writes::default(),
        options: StartOptions::default(),
    }
}

fn start() -> Command {
    let secret = FingerprintKey([1; 32]);
    let start = asked().check(&Options::default(), &secret, &Limits::default()).expect("a sound request");
    Command::Start(Box::new(start))
}

fn terms() -> Terms {
    Terms {
        worker: WorkerRef { label: "a".into(), boot: 1, remote: false },
        announced: Arc::new(Announced {
            namespace: Namespace::default_namespace(),
            definitions: [(Name::trusted("flow"), Steps::AllBut([].into()))].into(),
        }),
        lease_ms: 30_000,
        seed: SEED,
    }
}

fn claim() -> Command {
    Command::Claim(Request { terms: terms(), n: 1, id: Some(CallId("q1".into())) })
}

/// The claim that wrote `seq`, as the worker that made the calls above would hold it.
fn held(seq: u64) -> Held {
    Held { key: key(), seq, token: Token::derive(&SEED, &key(), seq), epoch: 1 }
}

fn complete(seq: u64, continuation: Continuation) -> Command {
    let writes = [(Key::trusted("n"), Some(Json::null()))].into_iter().collect();
    Command::Complete(Box::new(Complete { held: held(seq), writes, continuation, claim_next: None }))
}

fn fail(seq: u64, retry_after_ms: u64) -> Command {
    Command::Fail(Box::new(Fail {
        held: held(seq),
        kind: FailKind::Error { retryable: true, retry_after_ms: Some(retry_after_ms) },
        code: FailureCode::trusted("boom"),
        reason: "it broke".to_owned(),
        retry: None,
        jitter: 0,
        deliveries_max: 20,
    }))
}

fn sweep() -> Command {
    Command::Sweep(sweep::Sweep { limit: 10, jitter: 0, deliveries_max: 20 })
}

fn every_command() -> Vec<(&'static str, Command)> {
    let cancel = control::Cancel { key: key(), reason: String::new(), by: String::new() };
    let give_back =
        sweep::GiveBack { boots: sweep::Boots::only(2), orphaned: vec![], after: None, limit: 10, deliveries_max: 20 };
    vec![
        ("start", start()),
        ("claim", claim()),
        ("complete", complete(1, Continuation::Done(Json::null()))),
        ("fail", fail(1, 0)),
        ("beat", Command::Heartbeat(heartbeat::Request { beats: vec![Beat { held: held(1), progress: None }] })),
        ("cancel", Command::Cancel(cancel)),
        ("sweep", sweep()),
        ("give back", Command::GiveBack(give_back)),
    ]
}

/// A decision that misses rows stops before it has changed anything, and misses no row it did not name twice.
#[test]
fn a_decision_that_misses_rows_has_changed_nothing() {
    for (name, command) in every_command() {
        let mut snapshot = Snapshot::new();
        let stopped = decide(&mut snapshot, &command, &NOW);
        let Err(Stop::Missing(wants)) = stopped else { panic!("{name} decided on nothing: {stopped:?}") };
        assert!(!wants.is_empty(), "{name}");
        assert!(!snapshot.is_changed(), "{name}");
        let mut beforehand = Default::default();
        command.wants(&NOW, &mut beforehand);
        let missed = format!("{wants:?}");
        assert!(
            wants.heads.is_subset(&beforehand.heads)
                && wants.admissions.is_subset(&beforehand.admissions)
                && wants.calls.is_subset(&beforehand.calls)
                && wants.due.is_none_or(|due| beforehand.due == Some(due))
                && wants.open.is_none_or(|open| beforehand.open == Some(open)),
            "{name} named what it would miss: {missed}"
        );
    }
}

#[test]
fn what_frees_work_has_a_lane_of_its_own() {
    let lanes: Vec<String> = every_command()
        .iter()
        .map(|(name, command)| format!("{name} {}", if command.lane() == Lane::Finish { "finishes" } else { "begins" }))
        .collect();
    assert_eq!(
        lanes,
        [
            "start begins",
            "claim begins",
            "complete finishes",
            "fail finishes",
            "beat finishes",
            "cancel begins",
            "sweep finishes",
            "give back finishes"
        ]
    );
}

/// A snapshot that holds `w1`, loaded as a store would: from the rows that another batch saved.
fn stored(after: &[Command], moment: &Moment) -> Snapshot {
    let mut saved = empty();
    for command in after {
        decide(&mut saved, command, moment).expect("it has what it needs");
    }
    let mut snapshot = empty();
    let heads: Vec<_> = saved.changed_heads().map(|changed| (1, changed.head.clone())).collect();
    for found in heads {
        snapshot.load_head(key(), Some(found));
    }
    snapshot
}

/// A snapshot that has looked for everything and found nothing.
fn empty() -> Snapshot {
    let mut snapshot = Snapshot::new();
    snapshot.load_admission(key(), None);
    snapshot.load_call(Namespace::default_namespace(), CallId("q1".into()), None);
    snapshot.load_ready(terms().announced, 10, vec![]);
    snapshot.load_due(vec![]);
    snapshot
}

fn change(snapshot: &Snapshot) -> HeadChange {
    let mut changes = snapshot.changed_heads();
    let change = changes.next().expect("a head changed").change;
    assert!(changes.next().is_none(), "one head changed");
    change
}

/// Two nodes whose clocks differ, or one whose command has waited: the sleep was ended at its time, and the claim was
/// told an earlier one.
#[test]
fn a_claim_told_an_earlier_time_starts_no_step_before_its_sleep_is_over() {
    let step = Continuation::Step { step: Step::trusted("next"), when: When::After(5_000) };
    let mut snapshot = stored(&[start(), claim(), complete(1, step)], &NOW);
    let mut again = claim();
    if let Command::Claim(request) = &mut again {
        request.id = None;
    }
    for (command, now) in [(sweep(), NOW.now + 5_000), (again, NOW.now + 4_990)] {
        decide(&mut snapshot, &command, &Moment { now, ..NOW }).expect("it has what it needs");
    }
    let times: Vec<(&str, i64)> = snapshot.appended().iter().map(|new| (new.event.kind(), new.at)).collect();
    assert_eq!(times, [("step_started", NOW.now + 5_000)]);
}

#[test]
fn a_head_is_moved_only_when_its_place_or_status_changes() {
    let step = |when| Continuation::Step { step: Step::trusted("next"), when };
    let run = |after: &[Command], then: &[Command], moment: Moment| {
        let mut snapshot = stored(after, &NOW);
        for command in then {
            decide(&mut snapshot, command, &moment).expect("it has what it needs");
        }
        change(&snapshot)
    };
    let later = Moment { now: NOW.now + 5_000, ..NOW };
    let beat = || Command::Heartbeat(heartbeat::Request { beats: vec![Beat { held: held(1), progress: None }] });
    let mut on = complete(1, step(When::Now));
    if let Command::Complete(complete) = &mut on {
        complete.claim_next = Some(terms());
    }
    assert_eq!(run(&[], &[start()], NOW), HeadChange::Insert);
    assert_eq!(run(&[start()], &[claim()], NOW), HeadChange::Move);
    assert_eq!(run(&[start(), claim()], &[beat()], later), HeadChange::InPlace);
    assert_eq!(run(&[start(), claim()], &[on], later), HeadChange::InPlace);
    assert_eq!(run(&[start(), claim()], &[complete(1, step(When::Now))], later), HeadChange::Move);
    assert_eq!(run(&[start(), claim()], &[complete(1, Continuation::Done(Json::null()))], NOW), HeadChange::Move);
    // A sleep that ends, is claimed and fails into a backoff that ends at the same instant: the same place in the
    // index of times, and still another row.
    let sleeping = [start(), claim(), complete(1, step(When::After(5_000)))];
    let mut again = claim();
    if let Command::Claim(request) = &mut again {
        request.id = None;
    }
    assert_eq!(run(&sleeping, &[sweep(), again, fail(3, 0)], later), HeadChange::Move);
}

#[test]
fn the_log_of_a_batch_tells_it_in_order() {
    let mut snapshot = empty();
    let commands = [start(), claim(), complete(1, Continuation::Done(Json::null()))];
    for command in &commands {
        decide(&mut snapshot, command, &NOW).expect("it has what it needs");
    }
    let log: Vec<(u64, &str)> = snapshot.appended().iter().map(|new| (new.seq, new.event.kind())).collect();
    assert_eq!(log, [(0, "workflow_created"), (1, "step_started"), (2, "step_completed"), (3, "workflow_completed")]);
    let ended = snapshot.hints().ended;
    assert!(matches!(ended.as_slice(), [(ended, Event::WorkflowCompleted { .. })] if *ended == key()));
    assert!(snapshot.hints().ready.is_empty() && snapshot.hints().due.is_none(), "nothing waits");
}

#[test]
fn hints_tell_what_to_wake() {
    let hints = |commands: &[Command]| {
        let mut snapshot = empty();
        for command in commands {
            decide(&mut snapshot, command, &NOW).expect("it has what it needs");
        }
        let hints = snapshot.hints();
        let ready: Vec<String> = hints.ready.iter().map(|((name, step), n)| format!("{name} {step} {n}")).collect();
        (ready.join(", "), hints.due.map(|due| due - NOW.now))
    };
    let step = |when| Continuation::Step { step: Step::trusted("next"), when };
    assert_eq!(hints(&[start()]), ("flow start 1".to_owned(), None));
    assert_eq!(hints(&[start(), claim()]), (String::new(), Some(30_000)), "claimed in the same batch");
    assert_eq!(hints(&[start(), claim(), complete(1, step(When::Now))]), ("flow next 1".to_owned(), None));
    assert_eq!(hints(&[start(), claim(), complete(1, step(When::After(7)))]), (String::new(), Some(7)));
    assert_eq!(hints(&[start(), claim(), fail(1, 9)]), (String::new(), Some(9)));
}

/// Whoever claims learns whether it left anything, also where just as many were ready as it asked for; a call that is
/// repeated looks at nothing new.
#[test]
fn a_page_says_whether_more_is_ready() {
    let mut snapshot = Snapshot::new();
    let requested = |n| {
        let Command::Claim(request) = claim() else { unreachable!() };
        Request { n, id: Some(CallId(format!("q{n}").as_str().into())), ..request }
    };
    let mut decided = |command: Command| loop {
        match decide(&mut snapshot, &command, &NOW) {
            Ok(outcome) => break outcome,
            Err(Stop::Missing(wants)) => {
                wants.admissions.iter().for_each(|key| snapshot.load_admission(key.clone(), None));
                wants.calls.iter().for_each(|(space, id)| snapshot.load_call(space.clone(), id.clone(), None));
                wants.ready.iter().for_each(|(known, n)| snapshot.load_ready(known.clone(), *n, Vec::new()));
            }
            Err(stop) => panic!("{stop:?}"),
        }
    };
    for id in ["a", "b", "c", "d", "e"] {
        let Command::Start(mut start) = start() else { unreachable!() };
        start.key.id = WorkflowId::trusted(id);
        decided(Command::Start(start));
    }
    let mut page = |n| match decided(Command::Claim(requested(n))) {
        Outcome::Claim(page) => (page.granted.len(), page.more),
        other => panic!("{other:?}"),
    };
    assert_eq!(page(2), (2, true));
    assert_eq!(page(2), (2, false), "the same call again");
    assert_eq!(page(3), (3, false));
    assert_eq!(page(1), (0, false));
}

/// A command decided twice, after a batch that was rolled back, grants the same token and writes the same events.
#[test]
fn a_command_decided_again_decides_the_same() {
    let decided = || {
        let mut snapshot = empty();
        let outcomes: Vec<Outcome> = [start(), claim(), fail(1, 9)]
            .iter()
            .map(|command| decide(&mut snapshot, command, &NOW).expect("it has what it needs"))
            .collect();
        (outcomes, snapshot.appended().to_vec())
    };
    assert_eq!(decided(), decided());
}

#[test]
fn writes_are_the_same_in_any_order() {
    let writes = |pairs: &[(&str, Option<&str>)]| -> Writes {
        pairs.iter().map(|(key, value)| (Key::trusted(*key), value.map(Json::trusted))).collect()
    };
    let these = writes(&[("a", Some("1")), ("b", None), ("c", Some("null"))]);
    for (others, same) in [
        (writes(&[("b", None), ("c", Some("null")), ("a", Some("1"))]), true),
        (writes(&[("a", Some("1")), ("b", None)]), false),
        (writes(&[("a", Some("1")), ("b", None), ("c", None)]), false),
        (writes(&[("a", Some("1.0")), ("b", None), ("c", Some("null"))]), false),
        (writes(&[("a", Some("1")), ("b", None), ("d", Some("null"))]), false),
        (writes(&[("a", Some("1")), ("b", None), ("c", Some("null")), ("d", None)]), false),
    ] {
        assert_eq!((these.same_as(&others), others.same_as(&these)), (same, same), "{others:?}");
    }
}

/// Every limit of a start, at the limit and one beyond it.
#[test]
fn the_limits_of_a_start() {
    let limits = Limits { value_bytes_max: 10, writes_bytes_max: 24, tags_max: 2, ..Limits::default() };
    let text = |bytes: usize| Json::parse(&format!("\"{}\"", "x".repeat(bytes - 2))).expect("JSON");
    let put = |pairs: &[(&str, usize)]| -> Writes {
        pairs.iter().map(|(key, bytes)| (Key::trusted(*key), Some(text(*bytes)))).collect()
    };
    let tags = |n: usize| (0..n).map(|n| Tag::trusted(format!("t{n}"))).collect();
    let refused = |change: &dyn Fn(&mut admission::Asked)| {
        let mut asked = asked();
        change(&mut asked);
        match asked.check(&Options::default(), &FingerprintKey([1; 32]), &limits) {
            Ok(_) => "accepted".to_owned(),
            Err(invalid) => format!("{} {}", invalid.code, invalid.field),
        }
    };
    assert_eq!(refused(&|asked| asked.input = text(10)), "accepted");
    assert_eq!(refused(&|asked| asked.input = text(11)), "value_too_large input");
    assert_eq!(refused(&|asked| asked.writes = put(&[("a", 10)])), "accepted");
    assert_eq!(refused(&|asked| asked.writes = put(&[("a", 11)])), "value_too_large writes.a");
    assert_eq!(refused(&|asked| asked.writes = put(&[("aa", 10), ("bb", 10)])), "accepted");
    assert_eq!(refused(&|asked| asked.writes = put(&[("aa", 10), ("bbb", 10)])), "writes_too_large writes");
    assert_eq!(refused(&|asked| asked.writes = put(&[("input", 5)])), "invalid_key writes.input");
    assert_eq!(refused(&|asked| asked.writes = put(&[("signal:x", 5)])), "invalid_key writes.signal:x");
    assert_eq!(refused(&|asked| asked.writes = put(&[("signal", 5)])), "accepted");
    assert_eq!(refused(&|asked| asked.writes = put(&[("", 5)])), "invalid_key writes");
    assert_eq!(refused(&|asked| asked.options.tags = tags(2)), "accepted");
    assert_eq!(refused(&|asked| asked.options.tags = tags(3)), "invalid_options tags");
}

/// Every limit of a step's commit, likewise.
#[test]
fn the_limits_of_a_commit() {
    let limits = Limits { value_bytes_max: 10, writes_bytes_max: 24, sleep_ms_max: 1_000, ..Limits::default() };
    let text = |bytes: usize| Json::parse(&format!("\"{}\"", "x".repeat(bytes - 2))).expect("JSON");
    let check = |key: &str, continuation: &Continuation| {
        let writes = [(Key::trusted(key), None)].into_iter().collect();
        match commit::check(&writes, continuation, 5_000, &limits) {
            Ok(()) => "accepted".to_owned(),
            Err(invalid) => format!("{} {}", invalid.code, invalid.field),
        }
    };
    let to = |step: &str, when| Continuation::Step { step: Step::trusted(step), when };
    let now = to("next", When::Now);
    assert_eq!(check("a", &now), "accepted");
    assert_eq!(check("input", &now), "invalid_key writes.input");
    assert_eq!(check("signal:x", &now), "invalid_key writes.signal:x");
    assert_eq!(check("a", &Continuation::Done(text(10))), "accepted");
    assert_eq!(check("a", &Continuation::Done(text(11))), "value_too_large result");
    assert_eq!(check("a", &to("", When::Now)), "invalid_continuation next.step");
    assert_eq!(check("a", &to("two\nlines", When::Now)), "invalid_continuation next.step");
    assert_eq!(check("a", &to("next", When::After(1_000))), "accepted");
    assert_eq!(check("a", &to("next", When::After(1_001))), "invalid_continuation next.run_at");
    assert_eq!(check("a", &to("next", When::After(u64::MAX))), "invalid_continuation next.run_at");
    assert_eq!(check("a", &to("next", When::At(6_000))), "accepted");
    assert_eq!(check("a", &to("next", When::At(6_001))), "invalid_continuation next.run_at");
    assert_eq!(check("a", &to("next", When::At(0))), "accepted");
    assert_eq!(check("a", &to("next", When::At(-1))), "invalid_continuation next.run_at");
    assert_eq!(check("a", &to("next", When::At(i64::MAX))), "invalid_continuation next.run_at");
}
