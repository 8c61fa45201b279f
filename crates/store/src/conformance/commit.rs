//! Commit: the fence, what is written, and how attempts end.

use super::Diary;

pub(super) fn a_workflow_from_start_to_end(diary: &mut Diary) {
    diary.tell(
        "
        start w1 input=1              started
        head w1                       ready start since 0s
        at 1s
        claim a                       w1@1:start
        head w1                       running start by a until 31s
        complete w1@1 to pay $user=7  committed ready
        head w1                       ready pay since 1s
        claim b                       w1@3:pay
        at 2s
        complete w1@3 done 42         committed completed
        head w1                       completed
        vars w1                       input=1@0 user=7@2
        log w1                        workflow_created, step_started, step_completed, step_started, step_completed, workflow_completed 42
        commits                       5
        claim a 9                     -
        next_due                      -
        ",
    );
}

pub(super) fn ten_steps_cost_eleven_commits(diary: &mut Diary) {
    diary.tell("start w1 claim=a   started w1@1:start");
    for step in 2..=10 {
        let said = diary.say(&format!("complete w1@last to s{step} $n={step} next=a"));
        assert_eq!(said, format!("committed running w1@{}:s{step}", 2 * step - 1));
    }
    diary.tell(
        "
        complete w1@last done 10      committed completed
        commits                       11
        get w1 n                      10@18
        ",
    );
}

pub(super) fn the_next_step_is_claimed_only_if_due_and_known(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        complete w1@1 to pay next=a knows=flow:start      committed ready
        claim a                       w1@3:pay
        complete w1@3 to ship after=1ms next=a            committed sleeping
        at 1ms
        sweep                         1 woken
        claim a                       w1@5:ship
        complete w1@5 to pay after=0ms next=a             committed running w1@7:pay
        complete w1@7 to pay at=1ms next=a                committed running w1@9:pay
        complete w1@9 done 1 next=a   committed completed
        ",
    );
}

pub(super) fn a_repeated_commit_is_already_committed(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        complete w1@1 to pay $user=7  committed ready
        at 5s
        mark
        again                         already_committed ready
        complete w1@1 to pay $user=7  already_committed ready
        + complete w1@1 to pay $user=7      already_committed ready
        reopen
        complete w1@1 to pay $user=7  already_committed ready
        unchanged                     yes
        claim b                       w1@3:pay
        complete w1@1 to pay $user=7  already_committed running
        complete w1@3 done 1          committed completed
        complete w1@1 to pay $user=7  already_committed completed
        restore
        complete w1@1 to pay $user=7  already_committed completed
        ",
    );
    // Also within one batch.
    diary.tell(
        "
        start w2 claim=a              started w2@1:start
        complete w2@1 to pay $user=7  committed ready
        + complete w2@1 to pay $user=7      already_committed ready
        + complete w2@1 to pay $user=8      lost
        ",
    );
}

pub(super) fn a_repeated_sleep_is_already_committed(diary: &mut Diary) {
    // After a duration, the repeat comes later and would end later: it is the same all the same.
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        complete w1@1 to pay after=30s      committed sleeping
        at 5s
        again                         already_committed sleeping
        head w1                       sleeping pay until 30s
        complete w1@1 to pay at=30s   already_committed sleeping
        complete w1@1 to pay at=31s   lost
        complete w1@1 to pay          lost
        start w2 claim=a              started w2@1:start
        complete w2@1 to pay          committed ready
        complete w2@1 to pay after=30s      lost
        ",
    );
}

pub(super) fn a_repeated_end_is_already_committed(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        complete w1@1 done [1.0] $user=7    committed completed
        mark
        again                         already_committed completed
        reopen
        complete w1@1 done [1.0] $user=7    already_committed completed
        complete w1@1 done [2.0] $user=7    lost
        complete w1@1 done [1.0]      lost
        complete w1@1 to pay $user=7  lost
        unchanged                     yes
        ",
    );
}

pub(super) fn a_repeated_commit_with_unset_keys_is_already_committed(diary: &mut Diary) {
    // A log keeps what was set apart from what was unset: their order among each other is no content.
    diary.tell(
        "
        start w1 $old=1 claim=a       started w1@1:start
        complete w1@1 to pay -$old $b=2 $a=1 -$ghost      committed ready
        again                         already_committed ready
        reopen
        again                         already_committed ready
        complete w1@1 to pay $b=2 $a=1 -$old              lost
        complete w1@1 to pay -$old $b=2 $a=1 $ghost=null  lost
        vars w1                       a=1@2 b=2@2 input=null@0
        ",
    );
}

pub(super) fn a_repeated_failure_is_already_committed(diary: &mut Diary) {
    diary.tell(
        "
        start w1 attempts=2 claim=a   started w1@1:start
        fail w1@1 boom                committed backoff
        mark
        again                         already_committed backoff
        fail w1@1 bang                lost
        return w1@1                   lost
        complete w1@1 to pay          lost
        unchanged                     yes
        at 500ms
        sweep                         1 woken
        claim a                       w1@3:start attempt 2 delivery 2
        fail w1@3 boom                committed failed
        again                         already_committed failed
        start w2 claim=a              started w2@1:start
        return w2@1                   committed ready
        again                         already_committed ready
        fail w2@1 boom                lost
        ",
    );
}

pub(super) fn a_repeated_commit_learns_its_own_next_claim_and_no_other(diary: &mut Diary) {
    // The answer was lost with the claim of the next step in it: the repeat brings it.
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        complete w1@1 to pay next=a   committed running w1@3:pay
        again                         already_committed running w1@3:pay
        complete w1@1 to pay          already_committed running
        ",
    );
    // What somebody else has claimed since is his: two workers with one token would both run the step.
    diary.tell(
        "
        start w2 claim=a              started w2@1:start
        complete w2@1 to pay next=a knows=flow:start      committed ready
        claim b                       w2@3:pay
        complete w2@1 to pay next=a   already_committed running
        start w3 claim=a              started w3@1:start
        return w3@1                   committed ready
        claim b                       w3@3:start delivery 2
        return w3@1                   already_committed running
        ",
    );
    // And after a restore it is void.
    diary.tell(
        "
        start w4 claim=a              started w4@1:start
        complete w4@1 to pay next=a   committed running w4@3:pay
        restore
        again                         already_committed running
        ",
    );
}

pub(super) fn another_token_or_content_has_lost(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        mark
        complete w1@1! to pay         lost
        fail w1@1! boom               lost
        return w1@1!                  lost
        unchanged                     yes
        complete w1@1 to pay $user=1  committed ready
        mark
        complete w1@1! to pay $user=1       lost
        complete w1@1 to ship $user=1       lost
        complete w1@1 to pay $user=2  lost
        complete w1@1 to pay          lost
        complete w1@1 to pay $user=1 $more=1      lost
        complete w1@1 done 1          lost
        fail w1@1 boom                lost
        return w1@1                   lost
        unchanged                     yes
        ",
    );
}

pub(super) fn a_late_commit_writes_nothing(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a 3                     w1@1:start, w2@1:start, w3@1:start
        at 30s
        sweep                         3 leases lost
        claim b 2                     w1@3:start delivery 2, w2@3:start delivery 2
        complete w2@3 to pay $user=2  committed ready
        cancel w3                     cancelled
        mark
        complete w1@1 to pay $user=1  lost
        complete w2@1 to pay $user=2  lost
        complete w3@1 done 1          lost
        fail w1@1 boom                lost
        return w2@1                   lost
        beat w1@1                     lost
        unchanged                     yes
        complete w1@3 to pay          committed ready
        ",
    );
}

pub(super) fn a_restore_voids_every_claim(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        claim a                       w1@1:start
        claim b remote                w2@1:start
        restore
        owner                         boot 2 epoch 2
        mark
        complete w1@1 to pay          lost
        complete w2@1 done 1          lost
        fail w1@1 boom                lost
        beat w2@1                     lost
        unchanged                     yes
        give_back                     2 given back
        claim a 2                     w1@3:start delivery 2, w2@3:start delivery 2
        complete w1@1 to pay          lost
        complete w1@3 done 1          committed completed
        ",
    );
}

pub(super) fn an_expired_lease_still_commits(diary: &mut Diary) {
    // Only the sweep's event ends a claim, not the clock by itself.
    diary.tell(
        "
        start w1 timeout=40s          started
        claim a lease=30s             w1@1:start
        at 50s
        complete w1@1 to pay          committed ready
        start w2                      started
        claim a 2 lease=30s           w1@3:pay, w2@1:start
        at 2m
        fail w1@3 boom                committed backoff
        beat w2@1                     until 150s
        complete w2@1 done 1          committed completed
        ",
    );
}

pub(super) fn unset_removes_and_null_is_a_value(diary: &mut Diary) {
    diary.tell(
        "
        start w1 $a=1 $b=2 $c=3 claim=a     started w1@1:start
        complete w1@1 to pay -$a $b=null -$ghost next=a   committed running w1@3:pay
        get w1 a                      -
        get w1 b                      null@2
        get w1 c                      3@0
        get w1 ghost                  -
        vars w1                       b=null@2 c=3@0 input=null@0
        complete w1@3 to pay $a=9 -$b next=a      committed running w1@5:pay
        vars w1                       a=9@4 c=3@0 input=null@0
        complete w1@5 done null -$a -$c     committed completed
        vars w1                       input=null@0
        ",
    );
    // Set and unset in the commits of one batch.
    diary.tell(
        "
        start w2 $a=1 claim=a         started w2@1:start
        complete w2@1 to pay -$a      committed ready
        + start w3 $a=1               started
        vars w2                       input=null@0
        vars w3                       a=1@0 input=null@0
        ",
    );
}

pub(super) fn writes_of_failed_attempts_vanish(diary: &mut Diary) {
    diary.tell(
        "
        start w1 $user=1 timeout=10s  started
        claim a                       w1@1:start
        fail w1@1 boom $user=2        committed backoff
        at 1s
        sweep                         1 woken
        claim a                       w1@3:start attempt 2 delivery 2
        at 11s
        sweep                         1 timed out
        complete w1@3 to pay $user=3  lost
        get w1 user                   1@0
        vars w1                       input=null@0 user=1@0
        ",
    );
}

pub(super) fn values_are_kept_byte_for_byte(diary: &mut Diary) {
    diary.tell(
        r#"
        start w1 input=[18446744073709551617,0.10,-0,1e400] claim=a       started w1@1:start
        complete w1@1 to pay $deep={"b":1,"a":[{"\u0000x":"\u0000"}]} $päron="\ud83d\ude00é" next=a     committed running w1@3:pay
        reopen
        get w1 input                  [18446744073709551617,0.10,-0,1e400]@0
        get w1 deep                   -
        "#
        .replace(r#""\u0000x""#, r#""x""#)
        .replace("get w1 deep                   -", r#"get w1 deep                   {"b":1,"a":[{"x":"\u0000"}]}@2"#)
        .as_str(),
    );
    diary.tell(
        r#"
        get w1 päron                  "\ud83d\ude00é"@2
        complete w1@3 done {"z":1.0,"a":"ü"}        committed completed
        log w1 from=5                 5: workflow_completed {"z":1.0,"a":"ü"}
        "#,
    );
}

pub(super) fn a_sleep_ends_at_its_time_and_no_earlier(diary: &mut Diary) {
    diary.tell(
        "
        start w1 priority=2 claim=a   started w1@1:start
        at 1s
        complete w1@1 to pay after=30s      committed sleeping
        head w1                       sleeping pay until 31s
        next_due                      31s
        at 30999ms
        sweep                         -
        claim a                       -
        at 31s
        claim a                       -
        sweep                         1 woken
        head w1                       ready pay since 31s rank 29s
        log w1                        workflow_created, step_started, step_completed
        claim a                       w1@3:pay
        complete w1@3 to ship at=1m   committed sleeping
        ",
    );
    // Woken late, its place in the claim order is that of its time.
    diary.tell(
        "
        at 65s
        start w2 priority=2           started
        at 2m
        reopen
        sweep                         1 woken
        head w1                       ready ship since 60s rank 58s
        claim a 2                     w1@5:ship, w2@1:start
        ",
    );
}

pub(super) fn a_sleep_into_the_past_is_none(diary: &mut Diary) {
    diary.tell(
        "
        at 1m
        start w1 claim=a              started w1@1:start
        complete w1@1 to pay at=10s   committed ready
        head w1                       ready pay since 60s
        claim a                       w1@3:pay
        complete w1@3 to pay at=1m    committed ready
        claim a                       w1@5:pay
        complete w1@5 to pay after=0ms      committed ready
        next_due                      -
        ",
    );
}

pub(super) fn failed_attempts_back_off(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        fail w1@1 boom                committed backoff
        head w1                       backoff start attempt 2 delivery 2 until 500ms
        next_due                      500ms
        at 499ms
        sweep                         -
        at 500ms
        sweep                         1 woken
        head w1                       ready start attempt 2 delivery 2 since 500ms
        claim a                       w1@3:start attempt 2 delivery 2
        fail w1@3 boom                committed backoff
        head w1                       backoff start attempt 3 delivery 3 until 1500ms
        at 2s
        sweep                         1 woken
        claim a                       w1@5:start attempt 3 delivery 3
        complete w1@5 to pay next=a   committed running w1@7:pay
        head w1                       running pay by a until 32s
        log w1 from=2 limit=3         2: step_failed boom retry at 500ms, step_started, step_failed boom retry at 1500ms
        ",
    );
    // The default policy strays by a fifth: the instant is not known, its bounds are.
    diary.tell(
        "
        start w2 name=plain claim=a   started w2@1:start
        fail w2@1 boom                committed backoff
        at 2399ms
        sweep                         -
        at 2600ms
        sweep                         1 woken
        ",
    );
}

pub(super) fn a_failure_may_name_its_own_delay(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        fail w1@1 boom after=7s       committed backoff
        head w1                       backoff start attempt 2 delivery 2 until 7s
        at 7s
        sweep                         1 woken
        claim a                       w1@3:start attempt 2 delivery 2
        fail w1@3 boom after=0s       committed backoff
        next_due                      7s
        sweep                         1 woken
        claim a                       w1@5:start attempt 3 delivery 3
        ",
    );
}

pub(super) fn exhausted_attempts_end_the_workflow_in_the_same_commit(diary: &mut Diary) {
    diary.tell(
        "
        start w1 attempts=2 claim=a   started w1@1:start
        fail w1@1 boom                committed backoff
        at 1s
        sweep                         1 woken
        claim a                       w1@3:start attempt 2 delivery 2
        commits                       4
        fail w1@3 bang after=3s       committed failed
        commits                       1
        head w1                       failed attempts_exhausted
        log w1 from=4                 4: step_failed bang, workflow_failed attempts_exhausted
        start w2 attempts=1 claim=a   started w2@1:start
        fail w2@1 boom                committed failed
        ",
    );
    // Five by default.
    diary.say("start w3 claim=a");
    for _ in 1..5 {
        assert_eq!(diary.say("fail w3@last boom after=0s"), "committed backoff");
        diary.tell("sweep      1 woken");
        diary.say("claim a");
    }
    diary.tell(
        "
        fail w3@last boom after=0s    committed failed
        next_due                      -
        ",
    );
}

pub(super) fn a_final_failure_ends_the_workflow_in_the_same_commit(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        commits                       1
        fail w1@1 card_declined final       committed failed
        commits                       1
        head w1                       failed card_declined
        log w1 from=2                 2: step_failed card_declined, workflow_failed card_declined
        reopen
        head w1                       failed card_declined
        again                         already_committed failed
        ",
    );
}

pub(super) fn a_step_may_have_its_own_policy(diary: &mut Diary) {
    diary.tell(
        "
        start w1 attempts=5 claim=a   started w1@1:start
        fail w1@1 boom attempts=1     committed failed
        start w2 attempts=1 claim=a   started w2@1:start
        fail w2@1 boom attempts=3     committed backoff
        ",
    );
}

pub(super) fn a_returned_step_costs_a_delivery_and_no_attempt(diary: &mut Diary) {
    diary.tell(
        "
        start w1 attempts=1 claim=a   started w1@1:start
        at 5s
        return w1@1                   committed ready
        head w1                       ready start delivery 2 since 5s
        log w1 from=2                 2: step_failed given_back uncounted
        claim b                       w1@3:start delivery 2
        complete w1@1 to pay          lost
        complete w1@3 to pay          committed ready
        head w1                       ready pay since 5s
        ",
    );
}
