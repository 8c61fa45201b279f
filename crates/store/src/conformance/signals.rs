//! Signals: accepted once, in order, before a wait, during a step or while waiting, and taken exactly once.

use super::Diary;

pub(super) fn a_signal_wakes_who_waits_for_it(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        claim a                               w1@1:start
        at 1s
        complete w1@1 wait paid ship          committed waiting
        head w1                               waiting ship for paid
        next_due                              -
        claim a                               -
        at 2s
        signal w1 paid payload={\"cents\":1.0}  accepted, taken
        head w1                               ready ship since 2s
        inbox w1                              -
        get w1 signal:paid                    {\"cents\":1.0}@3
        get w1 signal:                        {\"name\":\"paid\",\"signal_id\":\"s1\",\"visit\":2}@3
        claim a                               w1@4:ship
        complete w1@4 done 1                  committed completed
        log w1                                workflow_created, step_started, step_completed, signal_received paid, step_started, step_completed, workflow_completed 1
        verify                                clean
        ",
    );
}

pub(super) fn a_signal_before_the_wait_is_there_when_it_begins(diary: &mut Diary) {
    // Before the first step, while it runs, and between steps: one receipt each, and nothing in log or head.
    diary.tell(
        "
        start w1                              started
        mark
        signal w1 paid as=one payload=1       accepted
        head w1                               ready start since 0s
        log w1                                workflow_created
        claim a                               w1@1:start
        signal w1 other as=two payload=2      accepted
        signal w1 paid as=three payload=3     accepted
        head w1                               running start by a until 30s
        inbox w1                              1 paid one 1, 2 other two 2, 3 paid three 3
        complete w1@1 to pay next=a           committed running w1@3:pay
        complete w1@3 wait paid ship next=a   committed running w1@6:ship
        get w1 signal:paid                    1@5
        inbox w1                              2 other two 2, 3 paid three 3
        complete w1@6 wait paid ship next=a   committed running w1@9:ship
        get w1 signal:paid                    3@8
        complete w1@9 wait paid ship          committed waiting
        inbox w1                              2 other two 2
        signal w1 paid as=four payload=4      accepted, taken
        inbox w1 after=2                      -
        verify                                clean
        ",
    );
}

pub(super) fn of_several_names_the_first_accepted_counts(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        claim a                               w1@1:start
        signal w1 void as=b payload=2         accepted
        signal w1 paid as=a payload=1         accepted
        complete w1@1 wait paid|void next     committed ready
        get w1 signal:void                    2@3
        get w1 signal:paid                    -
        claim a                               w1@4:next
        complete w1@4 wait void|late next     committed waiting
        signal w1 other                       accepted
        head w1                               waiting next for void|late
        signal w1 late as=c payload=3         accepted, taken
        get w1 signal:                        {\"name\":\"late\",\"signal_id\":\"c\",\"visit\":3}@6
        inbox w1                              2 paid a 1, 3 other s1 null
        verify                                clean
        ",
    );
}

pub(super) fn many_signals_of_a_name_are_taken_in_their_order(diary: &mut Diary) {
    let mut page = String::from(
        "
        start w1                              started
        claim a                               w1@1:start
        ",
    );
    // More than are loaded at once, in one batch and across batches.
    for n in 0..20 {
        let joins = if n % 3 == 1 { "+ " } else { "" };
        page += &format!("{joins}signal w1 tick as=t{n} payload={n}   accepted\n");
    }
    let mut seq = 1;
    for n in 0..20 {
        let next = seq + 3;
        page += &format!("complete w1@{seq} wait tick start next=a   committed running w1@{next}:start\n");
        page += &format!("get w1 signal:tick   {n}@{}\n", seq + 2);
        seq = next;
    }
    page += &format!("complete w1@{seq} wait tick start   committed waiting\ninbox w1   -\nverify   clean\n");
    diary.tell(&page);
}

pub(super) fn signals_and_waits_of_one_batch(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        claim a                               w1@1:start
        signal w1 paid as=one payload=1       accepted
        + complete w1@1 wait paid ship        committed ready
        claim a                               w1@4:ship
        complete w1@4 wait paid ship          committed waiting
        + signal w1 paid as=two payload=2     accepted, taken
        + signal w1 paid as=three payload=3   accepted
        + signal w1 paid as=two payload=2     replay of 0s
        start w2                              started
        + signal w2 paid as=two payload=2     accepted
        inbox w1                              3 paid three 3
        inbox w2                              1 paid two 2
        log w1 from=4                         4: step_started, step_completed, signal_received paid
        verify                                clean
        ",
    );
}

pub(super) fn a_repeated_signal_is_a_replay(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        start w2                              started
        signal w1 paid as=one payload=1       accepted
        mark
        at 5s
        signal w1 paid as=one payload=1       replay of 0s
        signal w1 paid as=one payload=1.0     replay of 0s
        signal w1 paid as=one payload=2       identity_conflict with 0s
        signal w1 void as=one payload=1       identity_conflict with 0s
        unchanged                             yes
        signal w2 paid as=one payload=2       accepted
        claim a 2                             w1@1:start, w2@1:start
        complete w1@1 wait paid ship          committed ready
        signal w1 paid as=one payload=1       replay of 0s
        signal w1 paid as=one payload=3       identity_conflict with 0s
        cancel w1                             cancelled
        reopen
        mark
        signal w1 paid as=one payload=1       replay of 0s
        signal w1 paid as=one payload=2       identity_conflict with 0s
        signal w1 paid as=two                 already cancelled
        signal ghost paid                     unknown id
        signal blue/w1 paid                   unknown id
        unchanged                             yes
        ",
    );
}

pub(super) fn a_finished_workflow_takes_no_signal_and_keeps_those_it_had(diary: &mut Diary) {
    diary.tell(
        "
        start done                            started
        start failed                          started
        claim a 2                             done@1:start, failed@1:start
        signal done paid as=one payload=1     accepted
        complete done@1 done 1                committed completed
        fail failed@1 boom final              committed failed
        signal done paid as=two               already completed
        signal failed paid                    already failed
        inbox done                            1 paid one 1
        inbox failed                          -
        verify                                clean
        ",
    );
}

pub(super) fn a_wait_may_have_a_timeout(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        start w2                              started
        start w3                              started
        claim a 3                             w1@1:start, w2@1:start, w3@1:start
        at 1s
        complete w1@1 wait paid ship timeout=10s remind     committed waiting
        complete w2@1 wait paid ship timeout=10s remind     committed waiting
        complete w3@1 wait paid ship until=3s remind        committed waiting
        head w1                               waiting ship for paid until 11s else remind
        next_due                              3s
        at 3s
        sweep                                 1 waits over
        head w3                               ready remind since 3s
        at 10999ms
        sweep                                 -
        signal w1 paid                        accepted, taken
        at 20s
        sweep                                 1 waits over
        head w1                               ready ship since 10999ms
        head w2                               ready remind since 20s
        log w2                                workflow_created, step_started, step_completed, wait_timed_out
        get w2 signal:                        -
        claim a 9                             w3@4:remind, w1@4:ship, w2@4:remind
        verify                                clean
        ",
    );
}

pub(super) fn a_signal_that_comes_late_but_before_the_sweep_wins(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        start w2                              started
        claim a 2                             w1@1:start, w2@1:start
        complete w1@1 wait paid ship timeout=1s remind      committed waiting
        complete w2@1 wait paid ship timeout=1s remind      committed waiting
        at 1m
        signal w1 paid                        accepted, taken
        + sweep                               1 waits over
        + signal w2 paid as=late payload=1    accepted
        head w1                               ready ship since 60s
        head w2                               ready remind since 60s
        inbox w2                              1 paid late 1
        verify                                clean
        ",
    );
}

pub(super) fn a_wait_that_has_everything_at_once(diary: &mut Diary) {
    // A timeout that is past is over with the next sweep, unless the signal is there already.
    diary.tell(
        "
        start w1                              started
        start w2                              started
        claim a 2                             w1@1:start, w2@1:start
        signal w1 paid                        accepted
        at 5s
        complete w1@1 wait paid ship until=1s remind        committed ready
        complete w2@1 wait paid ship until=1s remind        committed waiting
        sweep                                 1 waits over
        head w1                               ready ship since 5s
        head w2                               ready remind since 5s
        ",
    );
}

pub(super) fn a_repeated_wait_is_already_committed(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        claim a                               w1@1:start
        complete w1@1 wait paid|void ship timeout=5s remind $x=1  committed waiting
        again                                 already_committed waiting
        complete w1@1 wait paid|void ship timeout=5s remind $x=1  already_committed waiting
        complete w1@1 wait paid ship timeout=5s remind $x=1       lost
        complete w1@1 wait paid|void ship $x=1                    lost
        complete w1@1 wait paid|void ship timeout=5s other $x=1   lost
        complete w1@1 wait paid|void other timeout=5s remind $x=1  lost
        complete w1@1 to ship $x=1            lost
        signal w1 void                        accepted, taken
        complete w1@1 wait paid|void ship timeout=5s remind $x=1  already_committed ready
        claim a                               w1@4:ship
        signal w1 paid as=early               accepted
        complete w1@4 wait paid ship next=a   committed running w1@7:ship
        again                                 already_committed running w1@7:ship
        complete w1@4 wait paid ship next=b   already_committed running
        verify                                clean
        ",
    );
}

pub(super) fn cancel_ends_a_wait(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        claim a                               w1@1:start
        complete w1@1 wait paid ship timeout=5s remind      committed waiting
        cancel w1                             cancelled
        + signal w1 paid                      already cancelled
        next_due                              -
        at 1m
        sweep                                 -
        log w1                                workflow_created, step_started, step_completed, workflow_cancelled
        verify                                clean
        ",
    );
}

pub(super) fn waits_survive_reopening_and_restores(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        start w2                              started
        claim a 2                             w1@1:start, w2@1:start
        signal w1 other as=o payload=[1.0]    accepted
        complete w1@1 wait paid ship timeout=1h remind      committed waiting
        complete w2@1 wait paid ship          committed waiting
        reopen
        head w1                               waiting ship for paid until 3600s else remind
        restore
        inbox w1                              1 other o [1.0]
        list status=waiting                   w2 w1
        signal w1 paid                        accepted, taken
        signal w2 paid                        accepted, taken
        claim a 2                             w1@4:ship, w2@4:ship
        verify                                clean
        ",
    );
}

pub(super) fn a_signal_of_unknown_outcome(diary: &mut Diary) {
    diary.tell(
        "
        start w1                              started
        claim a                               w1@1:start
        complete w1@1 wait paid ship          committed waiting
        fault not_committed
        signal w1 paid as=one payload=1       not committed
        again                                 accepted, taken
        again                                 replay of 0s
        fault unknown_written
        signal w1 paid as=two payload=1       unknown
        again                                 replay of 0s
        fault unknown_not_written
        signal w1 paid as=three payload=1     unknown
        again                                 accepted
        inbox w1                              2 paid two 1, 3 paid three 1
        verify                                clean
        ",
    );
}
