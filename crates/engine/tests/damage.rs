//! Damage: one workflow that cannot be read or saved, and all the others that must not wait for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use steadfast::core::claim::{self, Announced, Steps, Terms};
use steadfast::core::command::{Command, Moment, Outcome};
use steadfast::core::fingerprint::FingerprintKey;
use steadfast::core::head::WorkerRef;
use steadfast::core::state::Status;
use steadfast::core::text::{Name, Namespace};
use steadfast::store::clock::{Clock, SystemClock};
use steadfast::store::conformance::{Applied, apply};
use steadfast::store::postgres::PostgresStore;
use steadfast::store::sqlite::SqliteStore;
use steadfast::store::{Filter, Store};
use steadfast::{Builder, Ctx, Engine, StepResult, done, step};
use steadfast_pgtest::{Database, on_each_database, psql};
use tokio::sync::Semaphore;

/// Longer than anything here takes; what waits longer is stuck.
const STUCK: Duration = Duration::from_secs(90);
/// So many are well.
const OTHERS: usize = 100;

on_each_database! {
    #[tokio::test(flavor = "multi_thread")] async:
    one_that_is_due_and_cannot_be_read_does_not_hold_up_the_others,
    one_that_is_due_and_cannot_be_saved_does_not_hold_up_the_others,
    one_that_is_due_and_whose_log_is_ahead_does_not_hold_up_the_others,
    one_that_is_ready_and_cannot_be_saved_does_not_hold_up_the_others,
    one_that_is_ready_and_whose_log_is_ahead_does_not_hold_up_the_others,
    ten_that_are_due_and_cannot_be_saved_do_not_hold_up_the_others,
    ten_that_are_ready_and_cannot_be_saved_do_not_hold_up_the_others,
    one_that_breaks_a_rule_does_not_hold_up_the_others,
    one_that_a_dead_process_held_and_cannot_be_saved_does_not_hold_up_the_others,
    one_that_runs_and_whose_log_is_ahead_does_not_hold_up_the_others,
    what_stays_due_is_not_looked_for_without_a_pause,
    a_store_that_refuses_all_that_is_due_is_not_ready,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Damage {
    Unreadable,
    /// Whatever is to be written of it is refused.
    Refused,
    /// Its log has an event more than its head knows of.
    LogAhead,
    /// Its head says what no rule reckons with.
    Absurd,
}

/// Where the damaged one and the others stand when the damage is done.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Sleeping,
    Ready,
    /// In the hands of a process that has ended.
    HeldByProcess,
    /// Of a worker elsewhere whose lease is over.
    HeldElsewhere,
}

impl Damage {
    /// Does it to the workflows whose name begins with `bad`, while nobody has the store open.
    fn does(self, database: &Database) {
        let refuse = match database.file() {
            Some(_) => {
                "create trigger refuse before update on heads when old.id like 'bad%'
                 begin select raise(abort, 'it cannot be saved'); end"
            }
            None => {
                "create function refuse() returns trigger language plpgsql as $$ begin
                     raise check_violation using message = 'it cannot be saved';
                 end $$;
                 create trigger refuse before update on heads for each row when (old.id like 'bad%')
                     execute function refuse()"
            }
        };
        let statement = match self {
            Self::Unreadable => "update heads set options = '{' where id like 'bad%'",
            Self::Refused => refuse,
            Self::Absurd => "update heads set attempt = 0 where id like 'bad%'",
            Self::LogAhead => {
                "insert into events (namespace, workflow, seq, type, version, at, payload)
                 select e.namespace, e.workflow, e.seq + 1, e.type, e.version, e.at, e.payload from events e
                 join heads h on h.workflow = e.workflow and h.seq = e.seq where h.id like 'bad%'"
            }
        };
        run(database, statement);
    }

    fn undo(self, database: &Database) {
        let statement = match self {
            Self::Unreadable => "update heads set options = null where id like 'bad%'",
            Self::Refused if database.file().is_none() => "drop trigger refuse on heads",
            Self::Refused => "drop trigger refuse",
            Self::Absurd => "update heads set attempt = 1 where id like 'bad%'",
            Self::LogAhead => {
                "delete from events where exists (
                     select 1 from heads h
                     where h.id like 'bad%' and h.workflow = events.workflow and h.seq < events.seq)"
            }
        };
        run(database, statement);
    }
}

fn run(database: &Database, statement: &str) {
    if let Some(path) = database.file() {
        let connection = rusqlite::Connection::open(path).expect("the file opens");
        connection.busy_timeout(STUCK).expect("it may wait");
        connection.execute_batch(statement).expect("it is sound");
        return;
    }
    let url = database.url();
    let (base, schema) = url.split_once("?schema=").expect("a schema is named");
    psql(base, &format!("set search_path = {schema}; {statement}")).expect("it is sound");
}

/// A nap of that many milliseconds between two steps, or a step that does not end.
async fn nap(ctx: Ctx) -> StepResult {
    let millis: u64 = ctx.input().await?;
    Ok(if ctx.step() == "start" { step("later").after(Duration::from_millis(millis)) } else { done(()) })
}

fn open(database: &Database) -> Builder {
    Engine::open(&database.url()).expect("the store opens").register("nap", nap)
}

/// How many workflows have this status.
async fn count(engine: &Engine, status: Status) -> usize {
    let filter = Filter { status: Some(status), ..Filter::all(Namespace::default_namespace()) };
    let page = engine.look(move |reader| reader.list(&filter, None, OTHERS + 20)).await.expect("it lists");
    page.items.len()
}

async fn until(what: &str, engine: &Engine, status: Status, n: usize) {
    let begin = Instant::now();
    while count(engine, status).await < n {
        assert!(begin.elapsed() < STUCK, "{what}: {} are {status:?}", count(engine, status).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Brings all of them to a place, the damaged one in front, and closes the store.
async fn bring(database: &Arc<Database>, place: Place, bad: usize) {
    let concurrency = if place == Place::Sleeping { OTHERS + bad } else { 0 };
    let engine = open(database).concurrency(concurrency).run().expect("it runs");
    for name in (0..bad).map(|n| format!("bad{n}")).chain((0..OTHERS).map(|n| format!("w-{n}"))) {
        engine.start("nap", &1_000_u64).id(name).await.expect("it is admitted");
    }
    if place == Place::Sleeping {
        until("brought to sleep", &engine, Status::Sleeping, OTHERS + bad).await;
    }
    engine.shutdown(STUCK).await;
    let (remote, lease_ms) = match place {
        Place::Sleeping | Place::Ready => return,
        // A lease that is not waited for.
        Place::HeldByProcess => (false, 3_600_000),
        Place::HeldElsewhere => (true, 1),
    };
    let database = database.clone();
    tokio::task::spawn_blocking(move || claim_all(&database, remote, lease_ms, OTHERS + bad)).await.expect("no panic");
}

/// Claims them for a worker that is never heard of again.
fn claim_all(database: &Database, remote: bool, lease_ms: u64, all: usize) {
    let store = store(database, Arc::new(SystemClock::new()));
    let mut writer = store.writer().expect("it has a writer");
    let announced = Announced {
        namespace: Namespace::default_namespace(),
        definitions: [(Name::trusted("nap"), Steps::AllBut([].into()))].into(),
    };
    let worker = WorkerRef { label: "gone".into(), boot: store.identity().boot, remote };
    let terms = Terms { worker, announced: Arc::new(announced), lease_ms, seed: [7; 32] };
    let claim = Command::Claim(claim::Request { terms, n: all, id: None });
    let moment = Moment { now: store.clock().now(), epoch: writer.epoch() };
    let Applied::Committed(outcomes) = apply(writer.as_mut(), &moment, &[claim]) else { panic!("it is committed") };
    assert!(matches!(&outcomes[..], [Outcome::Claim(page)] if page.granted.len() == all));
}

fn store(database: &Database, clock: Arc<dyn Clock>) -> Box<dyn Store> {
    let secret = || Ok(FingerprintKey([0x5f; 32]));
    match database.file() {
        Some(path) => Box::new(SqliteStore::open_with(path, clock, secret).expect("it opens")),
        None => Box::new(PostgresStore::open_with(&database.url(), clock, secret).expect("it opens")),
    }
}

async fn passes(database: Database, place: Place, damage: Damage, bad: usize) {
    let database = Arc::new(database);
    bring(&database, place, bad).await;
    damage.does(&database);
    let mut engine = open(&database).concurrency(8).run().expect("it runs");
    until("beside the damaged one", &engine, Status::Completed, OTHERS).await;
    if damage != Damage::Unreadable {
        let head = engine.head("bad0").await.expect("it can be read");
        assert_ne!(head.status(), Status::Completed, "it is damaged");
    }
    // What comes later is not held up either.
    let later = engine.start("nap", &10_u64).id("later").await.expect("it is admitted");
    tokio::time::timeout(STUCK, later.end()).await.expect("it ends in time").expect("it is looked at");
    if damage != Damage::Unreadable {
        // Once it is mended it goes on without anybody's doing; who held it is looked for by whoever opens the store.
        damage.undo(&database);
        if place == Place::HeldByProcess {
            engine.shutdown(STUCK).await;
            engine = open(&database).concurrency(8).run().expect("it runs");
        }
        until("mended", &engine, Status::Completed, OTHERS + 1 + bad).await;
        let verified = engine.look(|reader| reader.verify(&mut |_| {})).await.expect("it can be verified");
        assert_eq!(verified.fault_count, 0, "{:?}", verified.faults);
    }
    engine.shutdown(STUCK).await;
}

async fn one_that_is_due_and_cannot_be_read_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::Sleeping, Damage::Unreadable, 1).await;
}

async fn one_that_is_due_and_cannot_be_saved_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::Sleeping, Damage::Refused, 1).await;
}

async fn one_that_is_due_and_whose_log_is_ahead_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::HeldElsewhere, Damage::LogAhead, 1).await;
}

async fn one_that_is_ready_and_cannot_be_saved_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::Ready, Damage::Refused, 1).await;
}

async fn one_that_is_ready_and_whose_log_is_ahead_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::Ready, Damage::LogAhead, 1).await;
}

async fn ten_that_are_due_and_cannot_be_saved_do_not_hold_up_the_others(database: Database) {
    passes(database, Place::Sleeping, Damage::Refused, 10).await;
}

async fn ten_that_are_ready_and_cannot_be_saved_do_not_hold_up_the_others(database: Database) {
    passes(database, Place::Ready, Damage::Refused, 10).await;
}

async fn one_that_breaks_a_rule_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::HeldElsewhere, Damage::Absurd, 1).await;
}

async fn one_that_a_dead_process_held_and_cannot_be_saved_does_not_hold_up_the_others(database: Database) {
    passes(database, Place::HeldByProcess, Damage::Refused, 1).await;
}

/// Its commit meets an event that is there already, again and again: the committer tried nothing else for 20 s.
async fn one_that_runs_and_whose_log_is_ahead_does_not_hold_up_the_others(database: Database) {
    let (begun, go) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let gate = {
        let (begun, go) = (begun.clone(), go.clone());
        move |_: Ctx| {
            let (begun, go) = (begun.clone(), go.clone());
            async move {
                begun.add_permits(1);
                go.acquire().await.expect("it is open").forget();
                Ok(done(()))
            }
        }
    };
    let engine = open(&database).register("gate", gate).concurrency(8).run().expect("it runs");
    let bad = engine.start("gate", &0).id("bad").await.expect("it is admitted");
    tokio::time::timeout(STUCK, begun.acquire()).await.expect("it begins").expect("it is open").forget();
    Damage::LogAhead.does(&database);
    go.add_permits(1);
    let others = async {
        for n in 0..10 {
            let other = engine.start("nap", &0_u64).id(format!("w-{n}")).await.expect("it is admitted");
            other.end().await.expect("it is looked at");
        }
    };
    tokio::time::timeout(STUCK, others).await.expect("they end in time");
    Damage::LogAhead.undo(&database);
    tokio::time::timeout(STUCK, bad.end()).await.expect("it ends once it is mended").expect("it is looked at");
    engine.shutdown(STUCK).await;
}

/// Counts how often somebody asks how long to wait.
#[derive(Debug)]
struct Asked(SystemClock, AtomicU32);

impl Clock for Asked {
    fn now(&self) -> i64 {
        self.0.now()
    }

    fn at_least(&self, at: i64) {
        self.0.at_least(at);
    }

    fn until(&self, at: i64) -> Option<Duration> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.until(at)
    }
}

async fn what_stays_due_is_not_looked_for_without_a_pause(database: Database) {
    let database = Arc::new(database);
    bring(&database, Place::Sleeping, 1).await;
    Damage::Unreadable.does(&database);
    let clock = Arc::new(Asked(SystemClock::new(), AtomicU32::new(0)));
    let engine = Engine::on(store(&database, clock.clone())).register("nap", nap).run().expect("it runs");
    until("beside the damaged one", &engine, Status::Completed, OTHERS).await;
    let (begin, before) = (Instant::now(), clock.1.load(Ordering::Relaxed));
    tokio::time::sleep(Duration::from_secs(2)).await;
    let asked = clock.1.load(Ordering::Relaxed) - before;
    let most = begin.elapsed().as_secs() * 20 + 20;
    assert!(u64::from(asked) <= most, "{asked} sweeps in {:?}", begin.elapsed());
    engine.shutdown(STUCK).await;
}

/// Nobody asks for anything, and neither of the two that are due can be saved: as far as can be told nothing can.
async fn a_store_that_refuses_all_that_is_due_is_not_ready(database: Database) {
    let engine = open(&database).run().expect("it runs");
    for id in ["bad0", "bad1"] {
        engine.start("nap", &2_000_u64).id(id).await.expect("it is admitted");
    }
    until("brought to sleep", &engine, Status::Sleeping, 2).await;
    Damage::Refused.does(&database);
    let begin = Instant::now();
    while engine.is_ready() {
        assert!(begin.elapsed() < STUCK, "it is ready for ever");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(engine.refuses_writes());
    Damage::Refused.undo(&database);
    until("mended", &engine, Status::Completed, 2).await;
    assert!(engine.is_ready());
    engine.shutdown(STUCK).await;
}
