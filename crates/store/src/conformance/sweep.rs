//! Sweep: what is overdue is found, once, and nothing else is touched.

use super::Diary;

pub(super) fn a_lost_lease_costs_a_delivery_and_no_attempt(diary: &mut Diary) {
    diary.tell(
        "
        start w1 attempts=1 claim=a   started w1@1:start
        next_due                      30s
        at 29999ms
        sweep                         -
        at 30s
        claim b                       -
        sweep                         1 leases lost
        head w1                       ready start delivery 2 since 30s
        log w1 from=2                 2: step_failed lease_lost uncounted
        sweep                         -
        claim b                       w1@3:start delivery 2
        complete w1@3 done 1          committed completed
        ",
    );
}

pub(super) fn twenty_lost_deliveries_end_the_workflow(diary: &mut Diary) {
    // An attempt that fails in between is no lost delivery.
    diary.tell(
        "
        start w1                      started
        claim a                       w1@1:start
        fail w1@1 boom after=0s       committed backoff
        sweep                         1 woken
        ",
    );
    for lost in 1..20 {
        diary.say("claim a lease=1s");
        diary.say("pass 1s");
        assert_eq!(diary.say("sweep"), "1 leases lost", "delivery {lost}");
    }
    diary.tell(
        "
        head w1                       ready start attempt 2 delivery 21 since 19s
        claim a lease=1s              w1@41:start attempt 2 delivery 21
        pass 1s
        commits                       43
        sweep                         1 leases lost
        commits                       1
        head w1                       failed deliveries_exhausted
        log w1 from=42                42: step_failed lease_lost uncounted, workflow_failed deliveries_exhausted
        complete w1@41 done 1         lost
        ",
    );
    // Steps given back count likewise; a new visit begins to count anew.
    diary.say("start w2 claim=a");
    for _ in 1..20 {
        assert_eq!(diary.say("return w2@last"), "committed ready");
        diary.say("claim a");
    }
    diary.tell(
        "
        complete w2@39 to pay         committed ready
        claim a                       w2@41:pay
        return w2@41                  committed ready
        ",
    );
    for _ in 2..20 {
        diary.say("claim a");
        assert_eq!(diary.say("return w2@last"), "committed ready");
    }
    diary.tell(
        "
        claim a                       w2@79:pay delivery 20
        return w2@79                  committed failed
        ",
    );
}

pub(super) fn a_step_timeout_costs_an_attempt(diary: &mut Diary) {
    diary.tell(
        "
        start w1 timeout=10s attempts=2     started
        claim a                       w1@1:start
        next_due                      10s
        at 9999ms
        sweep                         -
        at 10s
        sweep                         1 timed out
        head w1                       backoff start attempt 2 delivery 2 until 10500ms
        log w1 from=2                 2: step_failed step_timeout retry at 10500ms
        complete w1@1 to pay          lost
        at 11s
        sweep                         1 woken
        claim a                       w1@3:start attempt 2 delivery 2
        at 21s
        sweep                         1 timed out
        head w1                       failed attempts_exhausted
        log w1 from=4                 4: step_failed step_timeout, workflow_failed attempts_exhausted
        ",
    );
    // When both are over, the silent worker is the one to blame: no attempt is counted.
    diary.tell(
        "
        start w2 timeout=30s attempts=1     started
        claim a lease=30s             w2@1:start
        at 51s
        sweep                         1 leases lost
        ",
    );
}

pub(super) fn a_lease_that_lives_is_looked_at_once_a_lease(diary: &mut Diary) {
    // A workflow that goes from step to step keeps its place in the index of times; the sweep moves it on.
    diary.tell(
        "
        start w1                      started
        claim a                       w1@1:start
        at 10s
        complete w1@1 to pay next=a   committed running w1@3:pay
        head w1                       running pay by a until 40s
        next_due                      30s
        at 20s
        complete w1@3 to pay next=a   committed running w1@5:pay
        next_due                      30s
        at 30s
        sweep                         1 alive
        next_due                      50s
        sweep                         -
        at 49s
        complete w1@5 to pay next=a   committed running w1@7:pay
        at 55s
        complete w1@7 to pay next=a   committed running w1@9:pay
        next_due                      85s
        at 85s
        sweep                         1 leases lost
        ",
    );
    // A next step with a shorter lease or timeout is looked at in time.
    diary.tell(
        "
        start w2 timeout=12s          started
        claim a 1 knows=ghost:x       -
        cancel w1                     cancelled
        claim a lease=40s             w2@1:start
        at 86s
        complete w2@1 to pay next=b lease=5s      committed running w2@3:pay
        next_due                      91s
        at 91s
        sweep                         1 leases lost
        ",
    );
}

pub(super) fn live_leases_do_not_hide_an_expired_one(diary: &mut Diary) {
    // BC-041: a page full of rows that may not be touched must not hide the one behind them.
    const LIVE: usize = 5_000;
    let starts: Vec<String> =
        (0..LIVE).map(|n| format!("{}start w{n:04}", if n % 1_000 == 0 { "" } else { "+ " })).collect();
    diary.say_all(&starts);
    diary.say(&format!("claim a {LIVE}"));
    diary.tell(
        "
        at 1s
        start late                    started
        claim b                       late@1:start
        at 29s
        ",
    );
    let beats: Vec<String> = (0..LIVE).map(|n| format!("w{n:04}@1")).collect();
    diary.say(&format!("beat {}", beats.join(" ")));
    diary.tell(
        "
        at 31s
        next_due                      30s
        sweep limit=1000              1000 alive, more
        sweep limit=1000              1000 alive, more
        sweep limit=1000              1000 alive, more
        sweep limit=1000              1000 alive, more
        sweep limit=1000              1000 alive, more
        sweep limit=1000              1 leases lost
        head late                     ready start delivery 2 since 31s
        next_due                      59s
        ",
    );
}

pub(super) fn a_page_at_a_time_in_order_of_time(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        start w2 claim=a              started w2@1:start
        start w3 claim=a              started w3@1:start
        start w4 claim=a              started w4@1:start
        start w5 claim=a              started w5@1:start
        complete w4@1 to pay after=1s       committed sleeping
        complete w1@1 to pay after=2s       committed sleeping
        fail w3@1 boom after=3s       committed backoff
        complete w2@1 to pay after=4s       committed sleeping
        at 1m
        next_due                      1s
        sweep limit=2                 2 woken, more
        head w4                       ready pay since 1s
        head w1                       ready pay since 2s
        next_due                      3s
        sweep limit=2                 2 woken, more
        sweep limit=2                 1 leases lost
        sweep limit=2                 -
        ",
    );
}

pub(super) fn it_leaves_alone_what_committed_in_the_same_batch(diary: &mut Diary) {
    // BC-044: the sweep's page was read before the commit was decided; the row is judged again.
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        start w4                      started
        claim a 4                     w1@1:start, w2@1:start, w3@1:start, w4@1:start
        at 30s
        complete w1@1 done 1          committed completed
        + complete w2@1 to pay next=a       committed running w2@3:pay
        + beat w3@1                   until 60s
        + sweep                       1 leases lost, 1 alive
        + complete w4@1 done 1        lost
        head w1                       completed
        head w2                       running pay by a until 60s
        head w3                       running start by a until 60s
        head w4                       ready start delivery 2 since 30s
        ",
    );
}

pub(super) fn two_sweeps_of_one_batch(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        start w2 claim=a              started w2@1:start
        start w3 claim=a              started w3@1:start
        at 30s
        sweep limit=2                 2 leases lost, more
        + sweep limit=1               more
        sweep limit=2                 1 leases lost
        sweep                         -
        ",
    );
}

pub(super) fn a_new_owner_gives_back_what_dead_workers_held(diary: &mut Diary) {
    diary.tell(
        "
        start w1 attempts=1           started
        start w2                      started
        start w3                      started
        claim a                       w1@1:start
        claim b remote                w2@1:start
        at 1s
        reopen
        owner                         boot 2 epoch 1
        claim c                       w3@1:start
        give_back                     1 given back, 2 alive
        head w1                       ready start delivery 2 since 1s
        log w1 from=2                 2: step_failed given_back uncounted
        head w2                       running start by b until 30s
        complete w1@1 to pay          lost
        complete w2@1 to pay          committed ready
        complete w3@1 to pay          committed ready
        give_back                     -
        claim c                       w1@3:start delivery 2
        ",
    );
}

pub(super) fn a_restored_store_gives_back_every_claim(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a                       w1@1:start
        claim b remote                w2@1:start
        restore
        owner                         boot 2 epoch 2
        claim c remote                w3@1:start
        give_back                     2 given back, 1 alive
        complete w3@1 done 1          committed completed
        claim c 2                     w1@3:start delivery 2, w2@3:start delivery 2
        ",
    );
}

pub(super) fn giving_back_pages_through_all_claims(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        start w4                      started
        start w5                      started
        claim b 1 remote              w1@1:start
        claim b 1 remote              w2@1:start
        claim a 1                     w3@1:start
        claim b 1 remote lease=10s    w4@1:start
        claim a 1 lease=10s           w5@1:start
        reopen
        give_back limit=2             1 given back, 1 alive, more
        give_back limit=2 on          2 alive, more
        give_back limit=2 on          1 given back
        give_back limit=2             2 alive, more
        give_back limit=2 on          1 alive
        ",
    );
    // The claim at which a page ended is gone when the next one is read.
    diary.tell(
        "
        give_back limit=1             1 alive, more
        complete w4@1 done 1          committed completed
        give_back limit=1 on          1 alive, more
        give_back limit=1 on          1 alive, more
        give_back limit=1 on          -
        ",
    );
    // Two pages in one batch are two pages.
    diary.tell(
        "
        give_back limit=1             1 alive, more
        give_back limit=1             1 alive, more
        + give_back limit=1 on        1 alive, more
        give_back limit=1 on          -
        ",
    );
}

pub(super) fn giving_back_in_two_namespaces(diary: &mut Diary) {
    diary.tell(
        "
        start blue/w1                 started
        start w1                      started
        start blue/w2                 started
        start w2                      started
        claim b 2 remote              w1@1:start, w2@1:start
        claim b 2 remote in=blue      blue/w1@1:start, blue/w2@1:start
        reopen
        give_back limit=1             1 alive, more
        give_back limit=1 on          1 alive, more
        give_back limit=1 on          1 alive, more
        give_back limit=1 on          1 alive, more
        give_back limit=1 on          -
        at 30s
        sweep limit=3                 3 leases lost, more
        sweep limit=3                 1 leases lost
        ",
    );
}

pub(super) fn orphaned_claims_are_given_back(diary: &mut Diary) {
    // The caller never heard what it was given; the other claims of this very process go on.
    diary.tell(
        "
        start w1                      started
        start w2                      started
        start w3                      started
        claim a                       w1@1:start
        fault unknown_written
        claim a                       unknown
        give_back                     2 alive
        give_back orphaned            1 given back, 1 alive
        complete w1@1 to pay          committed ready
        head w2                       ready start delivery 2 since 0s
        fault unknown_written
        start w4 claim=a              unknown
        give_back orphaned            1 given back
        start w4 claim=a              replay of 0s
        head w4                       ready start delivery 2 since 0s
        ",
    );
}
