//! Admission: a start is accepted once, and its receipt tells so for ever.

use super::Diary;

pub(super) fn a_repeated_start_is_a_replay(diary: &mut Diary) {
    diary.tell(
        "
        start w1 input=1              started
        at 5s
        mark
        start w1 input=1              replay of 0s
        start w1 input=1.0            replay of 0s
        unchanged                     yes
        claim a                       w1@1:start
        complete w1@1 done 1          committed completed
        at 1d
        start w1 input=1              replay of 0s
        receipt w1                    admitted at 0s
        log w1                        workflow_created, step_started, step_completed, workflow_completed 1
        ",
    );
}

pub(super) fn another_request_under_the_same_id_is_a_conflict(diary: &mut Diary) {
    diary.tell(
        "
        start w1 input=1              started
        at 5s
        mark
        start w1 input=2              identity_conflict with 0s
        start w1 input=1 name=other   identity_conflict with 0s
        start w1 input=1 $user=1      identity_conflict with 0s
        start w1 input=1 priority=1   identity_conflict with 0s
        start w1 input=1 timeout=1s   identity_conflict with 0s
        start w1 input=1 attempts=2   identity_conflict with 0s
        unchanged                     yes
        start w1 input=1              replay of 0s
        ",
    );
}

pub(super) fn starts_of_one_id_in_one_batch(diary: &mut Diary) {
    diary.tell(
        "
        start w1 input=1              started
        + start w1 input=1            replay of 0s
        + start w1 input=2            identity_conflict with 0s
        + start w2 input=2            started
        + claim a 5                   w1@1:start, w2@1:start
        commits                       1
        log w1                        workflow_created, step_started
        list                          w2 w1
        ",
    );
}

pub(super) fn a_start_may_claim_its_first_step(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        commits                       1
        head w1                       running start by a until 30s
        start w1 claim=b              replay of 0s
        claim b                       -
        start w2 name=other claim=a   started
        head w2                       ready start since 0s
        start w3 claim=a knows=flow:pay     started
        start blue/w1 claim=a         started blue/w1@1:start
        complete w1@1 done 1          committed completed
        complete blue/w1@1 done 1     committed completed
        ",
    );
}

pub(super) fn receipts_survive_reopening(diary: &mut Diary) {
    diary.tell(
        "
        start w1 input=1              started
        start blue/w1 input=2         started
        start w2 input=1              started
        cancel w2                     cancelled
        mark
        reopen
        unchanged                     yes
        owner                         boot 2 epoch 1
        start w1 input=1              replay of 0s
        start w1 input=2              identity_conflict with 0s
        start blue/w1 input=2         replay of 0s
        start w2 input=1              replay of 0s
        restore
        unchanged                     yes
        owner                         boot 3 epoch 2
        start w1 input=1              replay of 0s
        start w1 input=2              identity_conflict with 0s
        start w3                      started
        list                          w3 w2 w1
        list in=blue                  w1
        ",
    );
}

pub(super) fn initial_variables_and_input(diary: &mut Diary) {
    diary.tell(
        r#"
        start w1 input={"n":1.0} $user="Ada" $none=null      started
        vars w1                       input={"n":1.0}@0 none=null@0 user="Ada"@0
        start w1 input={"n":1} $none=null $user="Ada"        replay of 0s
        start w2 $input=1             invalid_key
        start w2 $signal:x=1          invalid_key
        receipt w2                    -
        "#,
    );
}

pub(super) fn ids_of_two_namespaces_do_not_meet(diary: &mut Diary) {
    diary.tell(
        "
        start w1 input=1              started
        + start blue/w1 input=2       started
        + start red/w1 input=3        started
        start blue/w1 input=1         identity_conflict with 0s
        start blue/w1 input=2         replay of 0s
        get w1 input                  1@0
        get blue/w1 input             2@0
        get red/w1 input              3@0
        cancel blue/w1                cancelled
        head w1                       ready start since 0s
        head blue/w1                  cancelled
        list                          w1
        list in=blue                  w1
        list in=red                   w1
        list in=green                 -
        ",
    );
}
