//! Heartbeat: how long a claim lasts.

use super::Diary;

pub(super) fn it_extends_the_lease_and_never_shortens_it(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        claim a lease=30s             w1@1:start
        at 10s
        beat w1@1                     until 40s
        beat w1@1                     until 40s
        at 35s
        sweep                         1 alive
        beat w1@1                     until 65s
        head w1                       running start by a until 65s
        log w1                        workflow_created, step_started
        at 65s
        sweep                         1 leases lost
        ",
    );
    // A lease that reaches further than the beat would set it keeps its end: two beats of one batch, say.
    diary.tell(
        "
        claim a lease=30s             w1@3:start delivery 2
        beat w1@3 w1@3                until 95s, until 95s
        + beat w1@3                   until 95s
        ",
    );
}

pub(super) fn a_beat_without_a_claim_is_lost(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a 3                     w1@1:start, w2@1:start, w3@1:start
        complete w1@1 to pay          committed ready
        cancel w2                     cancelled
        at 1s
        mark
        beat w1@1 w2@1 w3@1!          lost, lost, lost
        unchanged                     yes
        beat w1@1 w3@1                lost, until 31s
        restore
        beat w3@1                     lost
        ",
    );
}

pub(super) fn progress_is_kept_until_the_next(diary: &mut Diary) {
    diary.tell(
        r#"
        start w1                      started
        claim a                       w1@1:start
        beat w1@1 progress={"row":7}  until 30s
        beat w1@1                     until 30s
        head w1                       running start by a until 30s progress {"row":7}
        beat w1@1 progress=null       until 30s
        reopen
        head w1                       running start by a until 30s progress null
        complete w1@1 to pay next=a   committed running w1@3:pay
        head w1                       running pay by a until 30s
        "#,
    );
}

pub(super) fn it_does_not_move_the_step_timeout(diary: &mut Diary) {
    diary.tell(
        "
        start w1 timeout=45s          started
        claim a lease=30s             w1@1:start
        at 29s
        beat w1@1                     until 59s
        at 44999ms
        sweep                         1 alive
        at 45s
        beat w1@1                     until 75s
        sweep                         1 timed out
        beat w1@1                     lost
        ",
    );
}
