//! Planted: a checker that finds nothing proves nothing, so each kind of damage is done by hand and found.

use crate::found::Found;
use crate::judge::{Verdict, judge};
use crate::ledger::{Cancel, Ledger, Standing, Start};
use crate::scene::{Scene, verify};
use crate::site::Site;

/// The number of a workflow that has made several steps.
const VICTIM: &str =
    "(select min(workflow) from steadfast.heads where name = 'hello' and status = 'completed' and seq >= 6)";

/// One that has taken several signals.
const SIGNALLED: &str =
    "(select min(workflow) from steadfast.heads where name = 'tally' and status = 'completed' and seq >= 9)";

/// An id of which the callers know this.
fn id(ledger: &Ledger, is: impl Fn(&Start) -> bool) -> String {
    let starts = ledger.starts();
    let (id, _) = starts.iter().find(|(_, start)| is(start)).expect("the load has one");
    id.clone()
}

/// Which lists of a verdict have something in them.
fn kinds(verdict: &Verdict) -> String {
    let lists = [
        ("lost", &verdict.lost),
        ("ghost", &verdict.ghosts),
        ("doubled", &verdict.doubled),
        ("stuck", &verdict.stuck),
        ("wrong", &verdict.wrong),
    ];
    lists.iter().filter(|(_, list)| !list.is_empty()).map(|(kind, _)| *kind).collect::<Vec<_>>().join(" ")
}

#[test]
fn what_is_damaged_by_hand_is_found() {
    let site = Site::make();
    let url = site.url();
    let mut scene = Scene::begin("planted", &url, 1);
    scene.settle(&url);
    let clean = Found::read(&url);
    let mut verdict = judge(&scene.ledger, &clean);
    scene.look(&clean, &mut verdict);
    verify(std::slice::from_ref(&url), &mut verdict);
    scene.look_after_processes(&mut verdict);
    assert!(verdict.is_clean(), "{}", verdict.findings());

    let refused = id(&scene.ledger, |start| matches!(start.standing, Standing::Refused(_)));
    let cancelled = id(&scene.ledger, |start| start.cancel == Some(Cancel::Cancelled));
    let receipt = |id: &str| {
        format!(
            "insert into steadfast.admissions (workflow, admitted_at, namespace, id, fingerprint)
             select 1000000, admitted_at, namespace, '{id}', fingerprint from steadfast.admissions limit 1"
        )
    };
    let of_victim = |statement: &str| statement.replace("VICTIM", VICTIM);
    for (statements, expected) in [
        // Nothing of it is left, its receipt is not, or its head is not.
        (
            of_victim(
                "create temporary table victim as select VICTIM as workflow;
                 delete from steadfast.events where workflow = (select workflow from victim);
                 delete from steadfast.admissions where workflow = (select workflow from victim);
                 delete from steadfast.heads where workflow = (select workflow from victim)",
            ),
            "lost",
        ),
        (of_victim("delete from steadfast.admissions where workflow = VICTIM"), "lost"),
        (of_victim("delete from steadfast.heads where workflow = VICTIM"), "lost wrong"),
        // It is another one than was asked for.
        (
            of_victim(
                "update steadfast.events set payload = replace(payload, '\"steps\":', '\"steps\":1')
                 where workflow = VICTIM and seq = 0",
            ),
            "lost",
        ),
        (
            of_victim(
                "update steadfast.events set payload = replace(payload, '\"mark\":', '\"mark\":1')
                 where workflow = VICTIM and seq = 0",
            ),
            "lost",
        ),
        // A cancel was acknowledged and has not happened.
        (
            format!(
                "update steadfast.events set type = 'workflow_completed' where type = 'workflow_cancelled' and workflow =
                     (select workflow from steadfast.heads where id = '{cancelled}');
                 update steadfast.heads set status = 'completed' where id = '{cancelled}'"
            ),
            "lost wrong",
        ),
        // It was refused, or nobody has asked for it.
        (receipt(&refused), "ghost"),
        (receipt("nobody"), "ghost"),
        // The same workflow twice.
        (
            of_victim(
                "create temporary table twin as select * from steadfast.heads where workflow = VICTIM;
                 update twin set workflow = 1000000; insert into steadfast.heads select * from twin",
            ),
            "doubled",
        ),
        // A step is committed a second time, in the place of the claim after it.
        (
            of_victim(
                "update steadfast.events e set type = o.type, payload = o.payload from steadfast.events o
                 where e.workflow = VICTIM and e.seq = 3 and o.workflow = e.workflow and o.seq = 2",
            ),
            "doubled wrong",
        ),
        // It goes on for a visit more.
        (
            of_victim(
                "create temporary table more as select * from steadfast.events where workflow = VICTIM and seq in (1, 2);
                 create temporary table victim as select VICTIM as workflow;
                 update steadfast.events e set seq = e.seq + 2 from steadfast.heads h
                     where e.workflow = h.workflow and e.workflow = (select workflow from victim) and e.seq = h.seq;
                 update more m set seq = h.seq + m.seq - 1 from steadfast.heads h where h.workflow = m.workflow;
                 insert into steadfast.events select * from more;
                 update steadfast.heads set seq = seq + 2 where workflow = (select workflow from victim)",
            ),
            "doubled wrong",
        ),
        // It ends twice.
        (
            of_victim(
                "create temporary table ending as select e.* from steadfast.events e join steadfast.heads h
                     on h.workflow = e.workflow and h.seq = e.seq where e.workflow = VICTIM;
                 update ending set seq = seq + 1; insert into steadfast.events select * from ending;
                 update steadfast.heads h set seq = e.seq from ending e where h.workflow = e.workflow",
            ),
            "doubled",
        ),
        // It has not ended.
        (
            of_victim(
                "create temporary table victim as select VICTIM as workflow;
                 delete from steadfast.events e using steadfast.heads h
                     where e.workflow = h.workflow and e.seq = h.seq and e.workflow = (select workflow from victim);
                 update steadfast.heads set seq = seq - 1, status = 'running'
                     where workflow = (select workflow from victim)",
            ),
            "stuck wrong",
        ),
        // A signal is taken in the place of another.
        (
            format!(
                "update steadfast.events set payload = replace(payload, '-1\"', '-0\"')
                 where type = 'signal_received' and workflow = {SIGNALLED}"
            ),
            "lost doubled",
        ),
        // A step is missing; the order of the log is broken.
        (of_victim("delete from steadfast.events where workflow = VICTIM and seq in (3, 4)"), "wrong"),
        (of_victim("update steadfast.heads set seq = seq + 1 where workflow = VICTIM"), "wrong"),
        (of_victim("update steadfast.heads set status = 'failed', code = 'x' where workflow = VICTIM"), "wrong"),
    ] {
        let verdict = judge(&scene.ledger, &Found::read_after(&url, &statements));
        assert_eq!(kinds(&verdict), expected, "{statements}\n{}", verdict.findings());
    }

    // What other eyes than ours must see is done for good.
    let mut verdict = Verdict::default();
    site.primary.sql(&of_victim("update steadfast.heads set seq = seq + 1 where workflow = VICTIM"));
    verify(std::slice::from_ref(&url), &mut verdict);
    assert_eq!(kinds(&verdict), "wrong", "the product's own proof");
    let mut verdict = Verdict::default();
    site.primary.sql("delete from steadfast.events where seq = 1; delete from steadfast.heads where workflow % 2 = 0");
    scene.look(&clean, &mut verdict);
    assert_eq!(kinds(&verdict), "lost wrong", "what a look shows");
    let mut verdict = Verdict::default();
    let pid = scene.nodes.pids()[1].and_then(rustix::process::Pid::from_raw).expect("the node runs");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it can be killed");
    let begin = std::time::Instant::now();
    while verdict.is_clean() && begin.elapsed() < crate::common::STUCK {
        scene.look_after_processes(&mut verdict);
    }
    assert_eq!(kinds(&verdict), "wrong", "a node that has ended");
}
