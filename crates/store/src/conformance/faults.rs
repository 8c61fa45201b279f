//! Faults: a batch that broke leaves nothing, or the whole, and the repeat tells which.

use super::Diary;
use crate::contract::StoreError;

pub(super) fn a_failed_load_leaves_no_trace(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        mark
        fault load
        complete w1@1 to pay $user=1  not committed
        unchanged                     yes
        again                         committed ready
        ",
    );
}

pub(super) fn a_failed_save_leaves_no_trace(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        mark
        fault not_committed
        start w2                      not committed
        + start blue/w1 claim=a       not committed
        + complete w1@1 to pay $user=1      not committed
        + claim a request=q1          not committed
        unchanged                     yes
        receipt w2                    -
        again                         started | started blue/w1@1:start | committed ready | w1@3:pay
        list                          w2 w1
        list in=blue                  w1
        ",
    );
}

pub(super) fn a_start_of_unknown_outcome(diary: &mut Diary) {
    diary.tell(
        "
        fault unknown_written
        start w1 input=1              unknown
        at 1s
        again                         replay of 0s
        start w1 input=2              identity_conflict with 0s
        mark
        fault unknown_not_written
        start w2 input=1              unknown
        unchanged                     yes
        at 2s
        again                         started
        start w2 input=1              replay of 2s
        ",
    );
}

pub(super) fn a_failed_sync_is_unknown(diary: &mut Diary) {
    diary.tell(
        "
        fault sync
        start w1 claim=a              unknown
        at 1s
        again                         replay of 0s
        give_back orphaned            1 given back
        fault sync
        cancel w1                     unknown
        again                         already cancelled
        ",
    );
}

pub(super) fn a_commit_of_unknown_outcome(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        fault unknown_written
        complete w1@1 to pay after=10s $user=1    unknown
        at 1s
        again                         already_committed sleeping
        at 10s
        sweep                         1 woken
        claim a                       w1@3:pay
        mark
        fault unknown_not_written
        complete w1@3 to ship next=a  unknown
        unchanged                     yes
        at 11s
        again                         committed running w1@5:ship
        fault unknown_written
        complete w1@5 to pay next=a   unknown
        again                         already_committed running w1@7:pay
        fault unknown_written
        fail w1@7 boom                unknown
        again                         already_committed backoff
        at 1m
        sweep                         1 woken
        claim a                       w1@9:pay attempt 2 delivery 2
        fault unknown_written
        complete w1@9 done 1          unknown
        reopen
        again                         already_committed completed
        ",
    );
}

pub(super) fn a_claim_of_unknown_outcome(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2                      started
        fault unknown_written
        claim a request=q1            unknown
        again                         w1@1:start
        fault unknown_not_written
        claim a request=q2            unknown
        head w2                       ready start since 0s
        again                         w2@1:start
        complete w1@1 done 1          committed completed
        complete w2@1 done 1          committed completed
        ",
    );
    // What changes nothing has no outcome that could be unknown.
    diary.tell(
        "
        fault unknown_written
        start w1                      replay of 0s
        claim a                       -
        sweep                         -
        cancel w1                     already completed
        start w3                      unknown
        ",
    );
}

pub(super) fn as_many_writers_as_the_store_says(diary: &mut Diary) {
    let no_more = |diary: &Diary| {
        let others: Vec<_> = (1..diary.store().writers()).map(|_| diary.store().writer()).collect();
        assert!(others.iter().all(Result::is_ok), "the diary has one, the others are there to be taken");
        assert!(matches!(diary.store().writer().err(), Some(StoreError::WriterTaken)));
    };
    no_more(diary);
    diary.tell("start w1      started");
    diary.tell("reopen");
    no_more(diary);
}
