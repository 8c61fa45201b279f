//! The disk: nobody hears of what is not on it, and when it fails nobody is told a lie.
//!
//! Holding a sync is about SQLite, where it comes after the commit; in PostgreSQL it is a part of the commit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use steadfast::core::text::{Namespace, WorkflowId, WorkflowKey};
use steadfast::store::faults::{Fault, Faulty, Plan};
use steadfast::store::postgres::{PostgresReader, PostgresStore};
use steadfast::store::sqlite::{SqliteReader, SqliteStore};
use steadfast::store::{Reader, Store};
use steadfast::{Builder, Ctx, Engine, Error, Request, StepResult, done, step};
use steadfast_pgtest::{Database, on_each_database};

/// Longer than anything here takes; what waits longer is stuck.
const STUCK: Duration = Duration::from_secs(60);

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(STUCK, what).await.expect("it is stuck")
}

on_each_database! {
    #[tokio::test(flavor = "multi_thread")] async:
    faults_under_load_lose_nothing_and_double_nothing,
    a_claim_that_nobody_heard_of_is_given_back_though_that_fails_at_first,
    progress_that_the_store_refuses_at_first_is_sent_again,
}

fn faulty(database: &Database) -> (Builder, Plan) {
    let store: Box<dyn Store> = match database.file() {
        Some(path) => Box::new(SqliteStore::open(path).unwrap()),
        None => Box::new(PostgresStore::open(&database.url()).unwrap()),
    };
    let store = Faulty::new(store);
    let plan = store.plan();
    (Engine::on(store), plan)
}

/// Looks beside the engine, as another process would.
fn beside(database: &Database) -> Box<dyn Reader> {
    match database.file() {
        Some(path) => Box::new(SqliteReader::open(path).unwrap()),
        None => Box::new(PostgresReader::open(&database.url()).unwrap()),
    }
}

async fn count_up(ctx: Ctx) -> StepResult {
    let n: u32 = ctx.input().await?;
    let at: u32 = if ctx.step() == "start" { 1 } else { ctx.step().parse()? };
    ctx.set("at", &at)?;
    if at >= n { Ok(done(at)) } else { Ok(step((at + 1).to_string())) }
}

fn stands_in(database: &Database, id: &str) -> bool {
    count_in(database, [id.to_owned()]) == 1
}

/// How many of these workflows the database has.
fn count_in(database: &Database, ids: impl IntoIterator<Item = String>) -> usize {
    let reader = beside(database);
    let key = |id: String| WorkflowKey { namespace: Namespace::default_namespace(), id: WorkflowId::trusted(id) };
    ids.into_iter().filter(|id| reader.head(&key(id.clone())).unwrap().is_some()).count()
}

async fn until(what: impl Fn() -> bool) {
    within(async {
        while !what() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_hears_of_what_is_not_on_the_disk() {
    let database = Database::sqlite();
    let (builder, plan) = faulty(&database);
    let engine = builder.register("count", count_up).run().unwrap();
    let first = engine.start("count", &1).id("first").await.unwrap();
    assert_eq!(within(first.result::<u32>()).await.unwrap(), 1);
    plan.hold_syncs_after(0);
    let starting: Vec<_> = (0..20)
        .map(|n| {
            tokio::spawn({
                let engine = engine.clone();
                async move { engine.start("count", &3).id(format!("w{n}")).await }
            })
        })
        .collect();
    // It is written, and only its way to the disk is held.
    until(|| (0..20).any(|n| stands_in(&database, &format!("w{n}")))).await;
    let looks: Vec<_> = (0..20)
        .map(|n| {
            tokio::spawn({
                let engine = engine.clone();
                async move { engine.head(&format!("w{n}")).await }
            })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert!(starting.iter().all(|start| !start.is_finished()), "a start was answered before it was durable");
    assert!(looks.iter().all(|look| !look.is_finished()), "a look showed what was not durable");
    plan.release_syncs();
    for (start, look) in starting.into_iter().zip(looks) {
        let handle = within(start).await.unwrap().unwrap();
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
        // It came before the start or after it, but it came.
        assert!(matches!(within(look).await.unwrap(), Ok(_) | Err(Error::UnknownWorkflow { .. })));
    }
    engine.shutdown(STUCK).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn under_load_the_next_batch_is_written_while_one_is_on_its_way_to_the_disk() {
    let database = Database::sqlite();
    let (builder, plan) = faulty(&database);
    let engine = builder.register("count", count_up).run().unwrap();
    let start = |id: String| {
        tokio::spawn({
            let engine = engine.clone();
            async move { engine.start("count", &1).id(id).await }
        })
    };
    for round in 0.. {
        let id = |n: i32| format!("{round}-{n}");
        // The first is written with nothing behind it, so the committer itself goes to the disk with it, and is held.
        plan.hold_syncs_after(0);
        let mut starting = vec![start(id(-1))];
        until(|| stands_in(&database, &id(-1))).await;
        starting.extend((0..4_000).map(|n| start(id(n))));
        until(|| engine.load().0 >= 4_000 || stands_in(&database, &id(0))).await;
        if engine.load().0 >= 4_000 {
            assert_eq!(count_in(&database, (0..4_000).map(id)), 0);
            // The next batch has others behind it, so the committer goes on to write them while that batch is held.
            plan.hold_syncs_after(1);
            until(|| engine.load().0 == 0).await;
            until(|| count_in(&database, (0..4_000).map(id)) == 4_000).await;
            within(starting.remove(0)).await.unwrap().unwrap();
            assert!(starting.iter().all(|start| !start.is_finished()));
            plan.release_syncs();
            for start in starting {
                within(start).await.unwrap().unwrap();
            }
            break;
        }
        // A sweep came between: it stood behind the first, which went another way. All ends before the next round, where
        // a commit of this one would be held in place of the first.
        plan.release_syncs();
        for start in starting {
            let handle = within(start).await.unwrap().unwrap();
            within(handle.result::<u32>()).await.unwrap();
        }
        assert!(round < 10, "no start comes alone");
    }
    engine.shutdown(STUCK).await;
}

/// Starts again until the truth is known.
async fn start_surely(engine: &Engine, id: &str, unknown: &AtomicU32) {
    loop {
        match engine.start_request(Request::new("count").id(id).input(&5)).await {
            Ok(_) => return,
            Err(Error::OutcomeUnknown { .. }) => unknown.fetch_add(1, Ordering::Relaxed),
            Err(Error::Store(_) | Error::Overloaded { .. }) => 0,
            Err(error) => panic!("{error}"),
        };
    }
}

async fn faults_under_load_lose_nothing_and_double_nothing(database: Database) {
    let (builder, plan) = faulty(&database);
    let engine = builder.register("count", count_up).concurrency(32).run().unwrap();
    let (unknown, over) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let failing = tokio::spawn({
        let (plan, over) = (plan.clone(), over.clone());
        async move {
            let others = [Fault::UnknownWritten, Fault::NotCommitted, Fault::UnknownNotWritten, Fault::Load];
            let mut faults = others.iter().cycle().flat_map(|other| [Fault::Sync, *other]).take(50);
            let mut failed = 0;
            while !over.load(Ordering::Relaxed) {
                if plan.left() == 0 {
                    let Some(fault) = faults.next() else { break };
                    plan.add([fault]);
                    failed += 1;
                }
                tokio::time::sleep(Duration::from_millis(7)).await;
            }
            failed
        }
    });
    let clients: Vec<_> = (0..64)
        .map(|client| {
            let (engine, unknown) = (engine.clone(), unknown.clone());
            tokio::spawn(async move {
                for n in 0..20 {
                    let id = format!("c{client}-{n}");
                    start_surely(&engine, &id, &unknown).await;
                    assert_eq!(engine.handle(&id).result::<u32>().await.unwrap(), 5);
                }
            })
        })
        .collect();
    for client in clients {
        within(client).await.unwrap();
    }
    over.store(true, Ordering::Relaxed);
    assert!(failing.await.unwrap() > 10, "it was too short to meet each fault");
    assert!(unknown.load(Ordering::Relaxed) > 0, "no start met a fault");
    engine.shutdown(STUCK).await;
    let verified = beside(&database).verify(&mut |_| {}).unwrap();
    assert_eq!((verified.faults, verified.workflows), (vec![], 64 * 20));
}

/// The start brings a claim whose answer is lost, and giving that back fails: the workflow waited for its lease to end.
async fn a_claim_that_nobody_heard_of_is_given_back_though_that_fails_at_first(database: Database) {
    let (builder, plan) = faulty(&database);
    let engine = builder.register("count", count_up).run().unwrap();
    // Once it has looked for work that is ready, there is room for a start to bring its claim.
    within(engine.start("count", &1).await.unwrap().result::<u32>()).await.unwrap();
    plan.add([Fault::UnknownWritten, Fault::NotCommitted]);
    let lost = engine.start_request(Request::new("count").id("w").input(&1)).await;
    assert!(matches!(lost, Err(Error::OutcomeUnknown { .. })), "{lost:?}");
    let result = tokio::time::timeout(Duration::from_secs(10), engine.handle("w").result::<u32>()).await;
    assert_eq!(result.expect("it waits for a lease").unwrap(), 1);
    assert_eq!(plan.left(), 0);
    engine.shutdown(STUCK).await;
}

/// What a step had to report went away with the heartbeat that failed.
async fn progress_that_the_store_refuses_at_first_is_sent_again(database: Database) {
    let (builder, plan) = faulty(&database);
    let (begun, go) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let handler = {
        let (begun, go) = (begun.clone(), go.clone());
        move |ctx: Ctx| {
            let (begun, go) = (begun.clone(), go.clone());
            async move {
                begun.notify_one();
                go.notified().await;
                ctx.heartbeat("half")?;
                tokio::time::sleep(STUCK).await;
                Ok(done(()))
            }
        }
    };
    let engine = builder.register("reports", handler).lease(Duration::from_secs(60)).run().unwrap();
    engine.start("reports", &()).id("w").await.unwrap();
    let progress = async || engine.head("w").await.unwrap().claim.and_then(|claim| claim.progress);
    within(begun.notified()).await;
    // Every loop runs into some of them for a few seconds, and the heartbeat too.
    plan.add([Fault::Load; 40]);
    go.notify_one();
    within(async {
        while plan.left() > 0 {
            assert_eq!(progress().await, None);
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    let sent = tokio::time::timeout(Duration::from_secs(10), async {
        while progress().await.is_none() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    });
    sent.await.expect("it is sent again");
    engine.shutdown(Duration::ZERO).await;
}
