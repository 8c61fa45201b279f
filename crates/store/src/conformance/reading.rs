//! Reading: pages and looks beside the writer.

use super::Diary;

pub(super) fn events_in_pages(diary: &mut Diary) {
    diary.tell(
        "
        start w1 claim=a              started w1@1:start
        complete w1@1 to pay next=a   committed running w1@3:pay
        complete w1@3 done 1          committed completed
        log w1 limit=2                workflow_created, step_started
        log w1 from=2 limit=2         2: step_completed, step_started
        log w1 from=4 limit=9         4: step_completed, workflow_completed 1
        log w1 from=6                 -
        log w1 from=9223372036854775807     -
        log w1 limit=0                -
        ",
    );
}

pub(super) fn variables_in_pages(diary: &mut Diary) {
    // In the order of their bytes.
    diary.tell(
        "
        start w1 $b=1 $a=2 $Z=3 $é=4 $aa=5        started
        start w2 $x=1                 started
        vars w1                       Z=3@0 a=2@0 aa=5@0 b=1@0 input=null@0 é=4@0
        vars w1 limit=2               Z=3@0 a=2@0
        vars w1 after=a limit=2       aa=5@0 b=1@0
        vars w1 after=ab              b=1@0 input=null@0 é=4@0
        vars w1 after=é               -
        vars w1 limit=0               -
        ",
    );
}

pub(super) fn lists_in_pages_newest_first(diary: &mut Diary) {
    diary.tell(
        "
        start w3                      started
        start blue/w9                 started
        start w1                      started
        + start w5                    started
        + start w4                    started
        start w2                      started
        list page=1                   w2 w4 w5 w1 w3
        list page=2                   w2 w4 w5 w1 w3
        list page=5                   w2 w4 w5 w1 w3
        list page=6                   w2 w4 w5 w1 w3
        list in=blue page=1           w9
        cancel w4                     cancelled
        claim a 1                     w3@1:start
        list page=3                   w2 w4 w5 w1 w3
        reopen
        start w0                      started
        list                          w0 w2 w4 w5 w1 w3
        ",
    );
}

pub(super) fn lists_by_name_and_status(diary: &mut Diary) {
    diary.tell(
        "
        start w1                      started
        start w2 name=other           started
        start w3                      started
        start w4 name=plain           started
        start w5 name=other           started
        start w6                      started
        claim a 3                     w1@1:start, w3@1:start, w4@1:start
        complete w1@1 done 1          committed completed
        fail w4@1 boom final          committed failed
        cancel w5                     cancelled
        list name=flow page=1         w6 w3 w1
        list name=other page=1        w5 w2
        list name=ghost               -
        list status=ready page=1      w6 w2
        list status=running           w3
        list status=completed         w1
        list status=failed            w4
        list status=cancelled         w5
        list status=sleeping          -
        list status=ready name=flow   w6
        list status=failed name=flow  -
        list status=cancelled name=other    w5
        list status=cancelled in=blue       -
        ",
    );
}

pub(super) fn the_next_due_time(diary: &mut Diary) {
    diary.tell(
        "
        next_due                      -
        start w1 claim=a              started w1@1:start
        start w2 claim=a              started w2@1:start
        next_due                      30s
        complete w1@1 to pay after=10s      committed sleeping
        next_due                      10s
        cancel w1                     cancelled
        next_due                      30s
        fail w2@1 boom after=2m       committed backoff
        next_due                      120s
        at 3m
        next_due                      120s
        sweep                         1 woken
        next_due                      -
        ",
    );
}

pub(super) fn nothing_there(diary: &mut Diary) {
    diary.tell(
        "
        head w1                       -
        log w1                        -
        get w1 a                      -
        vars w1                       -
        receipt w1                    -
        head blue/w1                  -
        receipt blue/w1               -
        list                          -
        list in=blue                  -
        sweep                         -
        give_back                     -
        claim a                       -
        cancel w1                     unknown id
        commits                       0
        start w1                      started
        get w1 a                      -
        vars w1 after=input           -
        ",
    );
}
