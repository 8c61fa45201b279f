//! Control: cancelling from outside.

use super::Diary;

pub(super) fn cancel_in_every_live_state(diary: &mut Diary) {
    diary.tell(
        "
        start ready                   started
        start running                 started
        start sleeping                started
        start backoff                 started
        cancel ready                  cancelled
        claim a 9                     running@1:start, sleeping@1:start, backoff@1:start
        complete sleeping@1 to pay after=10s        committed sleeping
        fail backoff@1 boom           committed backoff
        cancel running                cancelled
        cancel sleeping               cancelled
        cancel backoff                cancelled
        complete running@1 to pay     lost
        at 1d
        next_due                      -
        sweep                         -
        claim a 9                     -
        log ready                     workflow_created, workflow_cancelled
        log running                   workflow_created, step_started, workflow_cancelled
        log sleeping                  workflow_created, step_started, step_completed, workflow_cancelled
        log backoff                   workflow_created, step_started, step_failed boom retry at 500ms, workflow_cancelled
        ",
    );
}

pub(super) fn cancel_of_what_is_over_or_unknown(diary: &mut Diary) {
    diary.tell(
        "
        start done                    started
        start failed                  started
        start cancelled               started
        cancel cancelled              cancelled
        claim a 2                     done@1:start, failed@1:start
        complete done@1 done 1        committed completed
        fail failed@1 boom final      committed failed
        mark
        cancel done                   already completed
        cancel failed                 already failed
        cancel cancelled              already cancelled
        cancel ghost                  unknown id
        cancel blue/done              unknown id
        unchanged                     yes
        ",
    );
}

pub(super) fn cancel_and_commit_in_one_batch(diary: &mut Diary) {
    // Settled by order: whoever comes second finds the claim gone or the workflow finished.
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a 9                     w1@1:start, w2@1:start, w3@1:start
        cancel w1                     cancelled
        + complete w1@1 done 1        lost
        + cancel w1                   already cancelled
        complete w2@1 done 2          committed completed
        + cancel w2                   already completed
        complete w3@1 to pay next=a   committed running w3@3:pay
        + cancel w3                   cancelled
        complete w3@3 done 3          lost
        log w3                        workflow_created, step_started, step_completed, step_started, workflow_cancelled
        ",
    );
}
