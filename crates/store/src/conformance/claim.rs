//! Claim: who gets which step, and when a call is repeated.

use super::Diary;

pub(super) fn in_order_of_time(diary: &mut Diary) {
    diary.tell(
        "
        start w2                      started
        start w1                      started
        at 1s
        start w0                      started
        claim a 2                     w2@1:start, w1@1:start
        claim a 2                     w0@1:start
        claim a 2                     -
        ",
    );
}

pub(super) fn in_order_of_priority_and_time(diary: &mut Diary) {
    // A step of priority is worth a second; so a low one is overtaken for so long and no longer.
    diary.tell(
        "
        start low priority=-2         started
        start w1                      started
        start high priority=3         started
        at 2500ms
        start later priority=3        started
        start last                    started
        head high                     ready start since 0s rank -3s
        claim a 2                     high@1:start, later@1:start
        claim a 1                     w1@1:start
        claim a 5                     low@1:start, last@1:start
        ",
    );
}

pub(super) fn what_becomes_ready_in_the_batch_is_claimed_in_its_place(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        claim a                       w1@1:start
        at 1s
        start w2                      started
        at 2s
        start high priority=50        started
        + complete w1@1 to pay        committed ready
        + claim b 2                   high@1:start, w2@1:start
        + claim b 2                   w1@3:pay
        ",
    );
}

pub(super) fn a_worker_gets_only_steps_it_announced(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3 name=other           started
        claim a 9 knows=flow:pay      -
        claim a 9 knows=ghost:*       -
        claim a 1 knows=flow:start|pay      w1@1:start
        complete w1@1 to pay          committed ready
        claim a 9 knows=flow:*-start  w1@3:pay
        claim a 9 knows=flow:*-start|pay    -
        claim a 9 knows=flow:*-pay,other:start      w2@1:start, w3@1:start
        complete w1@3 to ship         committed ready
        complete w2@1 to pay          committed ready
        complete w3@1 to pay          committed ready
        claim a 9 knows=flow:*-pay    w1@5:ship
        claim a 9 knows=flow:pay,other:pay          w2@3:pay, w3@3:pay
        ",
    );
}

pub(super) fn two_claims_of_one_batch_never_share(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        + start w2                    started
        + start w3                    started
        claim a 2                     w1@1:start, w2@1:start
        + claim b 2                   w3@1:start
        + claim c 2                   -
        log w1                        workflow_created, step_started
        ",
    );
}

pub(super) fn a_page_that_others_took_is_read_on(diary: &mut Diary) {
    // Each claim of the batch wants one row; the first row is the same for all of them.
    let lines: Vec<String> = (0..20).map(|n| format!("start w{n:02}")).collect();
    diary.say_all(&lines);
    let claims: Vec<&str> = std::iter::once("claim a 1").chain(std::iter::repeat_n("+ claim a 1", 18)).collect();
    let expected: Vec<String> = (0..19).map(|n| format!("w{n:02}@1:start")).collect();
    assert_eq!(diary.say_all(&claims), expected);
    diary.tell(
        "
        cancel w19                    cancelled
        + claim a 1                   -
        ",
    );
}

pub(super) fn a_repeated_call_brings_the_same_claims(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a 2 request=q1          w1@1:start, w2@1:start
        mark
        again                         w1@1:start, w2@1:start
        claim a 2 request=q1          w1@1:start, w2@1:start
        + claim a 1 request=q1        w1@1:start, w2@1:start
        unchanged                     yes
        reopen
        claim a 2 request=q1          w1@1:start, w2@1:start
        unchanged                     yes
        complete w1@1 to pay          committed ready
        complete w2@1 done 2          committed completed
        claim a 1 request=q2          w1@3:pay
        + claim b 1                   w3@1:start
        + claim a 1 request=q2        w1@3:pay
        ",
    );
}

pub(super) fn a_repeated_call_leaves_out_what_is_over(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a 3 request=q1          w1@1:start, w2@1:start, w3@1:start
        complete w1@1 to pay          committed ready
        cancel w2                     cancelled
        claim a 3 request=q1          w3@1:start
        claim b                       w1@3:pay
        claim a 3 request=q1          w3@1:start
        complete w3@1 done 1          committed completed
        claim a 3 request=q1          -
        ",
    );
}

pub(super) fn a_repeated_call_after_a_restore_brings_nothing(diary: &mut Diary) {
    // The claims of the first call are void, although the log still shows them open.
    diary.tell(
        "
        start w1                      started
        claim a request=q1            w1@1:start
        restore
        claim a request=q1            -
        give_back                     1 given back
        claim a request=q1            -
        claim a request=q2            w1@3:start delivery 2
        ",
    );
}

pub(super) fn a_call_is_remembered_for_a_day(diary: &mut Diary) {
    diary.tell(
        "
        start w1 timeout=10d          started
        start w2 timeout=10d          started
        start w3                      started
        claim a lease=10d request=q1  w1@1:start
        at 1d
        claim a lease=10d request=q2  w2@1:start
        claim a request=q1            w1@1:start
        at 86400001ms
        claim a request=q3            w3@1:start
        claim a request=q1            -
        claim a request=q2            w2@1:start
        ",
    );
}

pub(super) fn namespaces_do_not_see_each_other(diary: &mut Diary) {
    diary.tell(
        "
        start blue/w1                 started
        + start blue/w2               started
        claim a 9                     -
        + claim a 9 in=red            -
        + claim a 1 in=blue           blue/w1@1:start
        start w1                      started
        + claim a 9                   w1@1:start
        claim a 9 in=blue             blue/w2@1:start
        complete blue/w1@1 to pay next=a    committed running blue/w1@3:pay
        complete blue/w1@3 done 1     committed completed
        head w1                       running start by a until 30s
        ",
    );
}

pub(super) fn request_ids_of_two_namespaces_do_not_meet(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start blue/w1                 started
        claim a request=q1 in=blue    blue/w1@1:start
        claim a request=q1            w1@1:start
        claim a request=q1 in=blue    blue/w1@1:start
        claim a request=q1            w1@1:start
        ",
    );
}
