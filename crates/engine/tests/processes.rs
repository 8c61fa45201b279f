//! Several processes on one database: some are killed, some stand still and come back.
//!
//! A process is this test binary once more, told by its environment to be a node.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use steadfast::core::state::Status;
use steadfast::{Ctx, Engine, Request, StepResult, done, step};
use steadfast_pgtest::{Shared, psql, shared};
use tempfile::TempDir;

const STUCK: Duration = Duration::from_secs(30);
/// The lease of every node's steps here.
const LEASE: Duration = Duration::from_secs(5);
/// What a process is told: the store, and how many workflows it runs at once.
const STORE: &str = "STEADFAST_TEST_STORE";
const CONCURRENCY: &str = "STEADFAST_TEST_CONCURRENCY";

async fn within<F: IntoFuture>(work: F) -> F::Output {
    tokio::time::timeout(STUCK, work.into_future()).await.expect("it is done in time")
}

/// The file that lets the handlers of a process go on.
fn gate(folder: &Path, process: u32) -> PathBuf {
    folder.join(format!("go-{process}"))
}

/// Holds its place until its process is let go on, and says which that is. The input is the folder of the gates.
async fn hold(ctx: Ctx) -> StepResult {
    let folder: PathBuf = ctx.input().await?;
    while !gate(&folder, std::process::id()).exists() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(done(std::process::id()))
}

/// Sleeps until the instant of its input, in milliseconds by the store's clock. In a process of its own it hangs then.
async fn nap(ctx: Ctx) -> StepResult {
    if ctx.step() != "start" {
        if std::env::var(STORE).is_ok() {
            std::future::pending::<()>().await;
        }
        return Ok(done(std::process::id()));
    }
    let until: i64 = ctx.input().await?;
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().expect("it is after 1970").as_millis();
    let left = u128::from(until.unsigned_abs()).saturating_sub(since);
    Ok(step("over").after(Duration::from_millis(u64::try_from(left).expect("it is soon"))))
}

async fn stuck(_: Ctx) -> StepResult {
    std::future::pending().await
}

fn node(url: &str, concurrency: usize) -> Engine {
    let builder = Engine::open(url).expect("the store opens").lease(LEASE).concurrency(concurrency);
    builder.register("hold", hold).register("nap", nap).register("stuck", stuck).run().expect("it runs")
}

/// Not a test: what the other processes do.
#[test]
#[ignore = "run by the tests beside it"]
fn a_node_of_its_own() {
    let (Ok(url), Ok(concurrency)) = (std::env::var(STORE), std::env::var(CONCURRENCY)) else { return };
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let engine = runtime.block_on(async { node(&url, concurrency.parse().expect("a number")) });
    println!("\nit runs");
    std::io::stdout().flush().expect("somebody reads");
    // Until whoever started it is gone.
    let _ = std::io::stdin().read(&mut [0]);
    std::mem::forget(engine);
    std::process::exit(0);
}

/// A node of its own process, which does not outlive this value.
struct Process(Child);

impl Process {
    fn start(url: &str, concurrency: usize) -> Self {
        let mut child = Command::new(std::env::current_exe().expect("this binary has a path"))
            .args(["--ignored", "--exact", "--nocapture", "a_node_of_its_own"])
            .env(STORE, url)
            .env(CONCURRENCY, concurrency.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("this binary runs");
        let mut lines = BufReader::new(child.stdout.take().expect("it is piped")).lines();
        assert!(lines.any(|line| line.is_ok_and(|line| line == "it runs")), "it never ran");
        Self(child)
    }

    fn id(&self) -> u32 {
        self.0.id()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.id().cast_signed()).expect("a pid is not 0");
        kill_process(pid, signal).expect("it is ours");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Also one that stands still.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A schema that nobody has used before, and a way to look into it past the product.
struct Schema {
    url: String,
    _shared: Shared,
}

impl Schema {
    fn new() -> Self {
        let shared = shared();
        Self { url: shared.fresh_url(), _shared: shared }
    }

    fn sql(&self, statement: &str) -> String {
        let (base, schema) = self.url.split_once("?schema=").expect("it names a schema");
        psql(base, &statement.replace("SCHEMA", schema)).expect("it is answered").trim().to_owned()
    }

    /// Waits until this answers that.
    fn wait_for(&self, statement: &str, is: impl Fn(&str) -> bool) {
        let begin = Instant::now();
        loop {
            let told = self.sql(statement);
            if is(&told) {
                return;
            }
            assert!(begin.elapsed() < STUCK, "{statement} is still {told}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Recovery that was too eager took the work of processes that lived. One that stands still for less than its lease keeps
/// what it has; of one that does so for longer it is taken once, and what that one brings in the end is dropped.
#[tokio::test(flavor = "multi_thread")]
async fn a_process_that_stands_still_keeps_its_step_for_a_lease_and_no_longer() {
    let (schema, gates) = (Schema::new(), TempDir::new().unwrap());
    let front = node(&schema.url, 0);
    let paused = Process::start(&schema.url, 1);
    let start = |id: &str| front.start_request(Request::new("hold").id(id).input(gates.path()));
    within(start("w")).await.unwrap();
    schema.wait_for("select status from SCHEMA.heads where id = 'w'", |status| status == "running");
    let survivor = node(&schema.url, 1);

    let lease = || schema.sql("select lease_until from SCHEMA.heads where id = 'w'");
    paused.signal(Signal::STOP);
    tokio::time::sleep(LEASE / 4).await;
    let before = lease();
    paused.signal(Signal::CONT);
    schema.wait_for("select lease_until from SCHEMA.heads where id = 'w'", |until| until > before.as_str());
    let delivery = async || within(front.head("w")).await.unwrap().visit().map(|visit| visit.delivery);
    assert_eq!(delivery().await, Some(1), "it has its step still");

    paused.signal(Signal::STOP);
    schema.wait_for("select delivery from SCHEMA.heads where id = 'w' and status = 'running'", |n| n == "2");
    let held = within(front.head("w")).await.unwrap();
    // The one that wakes up ends its step at once, while the other is at it.
    std::fs::write(gate(gates.path(), paused.id()), "").unwrap();
    paused.signal(Signal::CONT);
    within(start("next")).await.unwrap();
    // It has room for that only when it has been told what became of its last step.
    assert_eq!(within(front.handle("next").result::<u32>()).await.unwrap(), paused.id());
    let head = within(front.head("w")).await.unwrap();
    assert_eq!((head.status(), head.seq), (Status::Running, held.seq), "what came late has changed nothing");
    std::fs::write(gate(gates.path(), std::process::id()), "").unwrap();
    assert_eq!(within(front.handle("w").result::<u32>()).await.unwrap(), std::process::id());
    let log = schema.sql(
        "select string_agg(e.type || coalesce(' ' || (e.payload::json ->> 'code'), ''), ', ' order by e.seq)
         from SCHEMA.events e join SCHEMA.heads h on h.workflow = e.workflow where h.id = 'w'",
    );
    let expected =
        "workflow_created, step_started, step_failed lease_lost, step_started, step_completed, workflow_completed";
    assert_eq!(log, expected);
    for node in [front, survivor] {
        node.shutdown(STUCK).await;
    }
}

/// Timers fired minutes late after a failover. Here a node is killed that holds some of what it has woken, and others fall
/// due after that: each is run once by the one that is left.
#[tokio::test(flavor = "multi_thread")]
async fn timers_of_a_killed_node_are_each_fired_once_by_another() {
    const COUNT: usize = 400;
    const HELD: usize = 16;
    let schema = Schema::new();
    let front = node(&schema.url, 0);
    let killed = Process::start(&schema.url, HELD);
    let (due, later) = (front.now() + 10_000, front.now() + 12_000);
    let until = |n: usize| if n.is_multiple_of(2) { due } else { later };
    let requests = (0..COUNT).map(|n| Request::new("nap").id(format!("n-{n}")).input(&until(n))).collect();
    for accepted in within(front.start_many(requests)).await.unwrap() {
        accepted.unwrap();
    }
    schema.wait_for("select count(*) from SCHEMA.heads where status = 'sleeping'", |n| n == COUNT.to_string());
    assert!(front.now() < due, "all of them sleep before the first is due");
    front.shutdown(STUCK).await;
    schema.wait_for("select count(*) from SCHEMA.heads where status = 'running'", |n| n == HELD.to_string());
    killed.signal(Signal::KILL);
    let survivor = node(&schema.url, HELD);
    schema.wait_for("select count(*) from SCHEMA.heads where status = 'completed'", |n| n == COUNT.to_string());
    let latest = schema.sql("select max(at) from SCHEMA.events where type = 'workflow_completed'");
    let late = latest.parse::<i64>().unwrap() - later;
    assert!(late < 2 * i64::try_from(LEASE.as_millis()).unwrap() + 5_000, "the last one was {late} ms late");
    let once = schema.sql(
        "select count(*) from (
             select e.workflow from SCHEMA.events e group by e.workflow
             having count(*) filter (where e.type = 'step_completed') = 2
                and count(*) filter (where e.type = 'workflow_completed') = 1
                and max((e.payload::json ->> 'attempt')::int) = 1) w",
    );
    assert_eq!(once, COUNT.to_string(), "each step is committed once, in its first attempt");
    let taken = "select count(*) from SCHEMA.events where type = 'step_failed'";
    assert_eq!(schema.sql(taken), HELD.to_string(), "what was held is given back once");
    let verified = survivor.look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!(verified.fault_count, 0, "{:?}", verified.faults);
    survivor.shutdown(STUCK).await;
}

/// A start that recovers thousands of workflows one by one took minutes. What was interrupted is given back page by page,
/// beside what comes new.
#[tokio::test(flavor = "multi_thread")]
async fn thousands_of_interrupted_workflows_are_given_back_by_the_page_beside_new_ones() {
    const COUNT: usize = 5_000;
    let schema = Schema::new();
    let front = node(&schema.url, 0);
    let killed = Process::start(&schema.url, COUNT);
    let requests = (0..COUNT).map(|n| Request::new("stuck").id(format!("s-{n}"))).collect();
    for accepted in within(front.start_many(requests)).await.unwrap() {
        accepted.unwrap();
    }
    schema.wait_for("select count(*) from SCHEMA.heads where status = 'running'", |n| n == COUNT.to_string());
    // Nobody is there who could run this, or give the others back, before.
    within(front.start("quick", &()).id("new")).await.unwrap();
    front.shutdown(STUCK).await;
    drop(killed);
    let quick = |_: Ctx| async { Ok(done(7)) };
    let engine = Engine::open(&schema.url).unwrap().register("quick", quick).run().unwrap();
    assert!(engine.is_ready(), "it does not wait for what was interrupted");
    let handle = within(engine.start("quick", &()).id("newer")).await.unwrap();
    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 7);
    assert_eq!(within(engine.handle("new").result::<u32>()).await.unwrap(), 7);
    schema.wait_for("select count(*) from SCHEMA.heads where status = 'ready'", |n| n == COUNT.to_string());
    let moment = |kind: &str, of: &str| -> i64 {
        let text = format!(
            "select max(e.at) from SCHEMA.events e join SCHEMA.heads h on h.workflow = e.workflow
             where e.type = '{kind}' and h.id like '{of}'"
        );
        schema.sql(&text).parse().unwrap()
    };
    let (served, recovered) = (moment("workflow_completed", "new"), moment("step_failed", "s-%"));
    assert!(served <= recovered, "a new workflow waited for {} ms", served - recovered);
    // A batch leaves its number in every head that it writes.
    let batches: usize =
        schema.sql("select count(distinct revision) from SCHEMA.heads where id like 's-%'").parse().unwrap();
    assert!((COUNT / 1_000..=COUNT / 250).contains(&batches), "{COUNT} were given back in {batches} batches");
    let attempts = schema.sql("select distinct attempt || ' ' || delivery from SCHEMA.heads where id like 's-%'");
    assert_eq!(attempts.lines().collect::<BTreeSet<_>>(), BTreeSet::from(["1 2"]), "none has cost an attempt");
    engine.shutdown(STUCK).await;
}
