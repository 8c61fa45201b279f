//! Engines that run by themselves, on the databases people use.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use steadfast::core::event::Event;
use steadfast::core::fingerprint::FingerprintKey;
use steadfast::core::state::Status;
use steadfast::core::text::WorkflowKey;
use steadfast::store::Store;
use steadfast::store::clock::{Clock, ManualClock};
use steadfast::store::postgres::PostgresStore;
use steadfast::store::sqlite::SqliteStore;
use steadfast::{Bounds, Builder, Ctx, Definition, Engine, Error, Request, StepResult, done, step};
use steadfast_pgtest::{Database, on_each_database};
use tokio::sync::{Notify, Semaphore};

/// Longer than anything here takes; what waits longer is stuck.
const STUCK: Duration = Duration::from_secs(30);

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(STUCK, what).await.expect("it is stuck")
}

on_each_database! {
    #[tokio::test(flavor = "multi_thread")] async:
    five_hundred_workflows_run_to_their_results,
    bulk_starts_are_each_answered_and_all_run,
    no_more_workflows_run_at_once_than_there_is_room_for,
    a_graceful_shutdown_lets_a_step_finish_and_gives_the_rest_back_without_an_attempt,
    a_late_result_is_lost_quietly_and_the_handler_is_told,
    a_heartbeat_keeps_a_long_step_and_shows_its_progress,
    an_attempt_that_takes_too_long_counts_and_frees_its_place,
    a_cancel_reaches_a_running_step,
    a_durable_sleep_ends_on_time_by_itself,
    a_full_beginning_lane_refuses_and_finishing_goes_on,
    bad_definitions_and_stores_are_refused_with_their_field,
    a_caller_that_goes_away_leaves_no_claim_behind,
    an_id_that_no_workflow_can_have_is_refused_before_the_store_is_asked,
    what_became_ready_while_all_places_were_taken_does_not_wait_for_a_poll,
    a_workflow_without_end_gives_way_to_others,
}

fn open(database: &Database) -> Builder {
    Engine::open(&database.url()).expect("the store opens")
}

/// The store in a database, by this clock.
fn by_clock(database: &Database, clock: Arc<dyn Clock>) -> Box<dyn Store> {
    let secret = || Ok(FingerprintKey([0x5f; 32]));
    match database.file() {
        Some(path) => Box::new(SqliteStore::open_with(path, clock, secret).unwrap()),
        None => Box::new(PostgresStore::open_with(&database.url(), clock, secret).unwrap()),
    }
}

async fn count_up(ctx: Ctx) -> StepResult {
    let n: u32 = ctx.input().await?;
    let at: u32 = if ctx.step() == "start" { 1 } else { ctx.step().parse()? };
    ctx.set("at", &at)?;
    if at >= n { Ok(done(at)) } else { Ok(step((at + 1).to_string())) }
}

/// Of two workflows and one place, the one that never ends is put back for the other after a while.
async fn a_workflow_without_end_gives_way_to_others(database: Database) {
    let endless = |ctx: Ctx| async move { Ok(step(if ctx.step() == "a" { "b" } else { "a" })) };
    let engine =
        open(&database).register("endless", endless).register("count", count_up).concurrency(1).run().expect("it runs");
    within(engine.start("endless", &0).id("endless").into_future()).await.expect("it is accepted");
    for n in 0..3 {
        let handle =
            within(engine.start("count", &3).id(format!("w-{n}")).into_future()).await.expect("it is accepted");
        assert_eq!(within(handle.result::<u32>()).await.expect("it has its turn"), 3);
    }
    within(engine.cancel("endless", "enough", "test")).await.expect("it is cancelled");
    engine.shutdown(STUCK).await;
}

async fn verify(engine: &Engine) {
    let verified = engine.look(|reader| reader.verify(&mut |_| {})).await.unwrap();
    assert_eq!(verified.faults, [], "the store is what its logs say");
}

async fn five_hundred_workflows_run_to_their_results(database: Database) {
    let engine = open(&database).register("count", count_up).concurrency(16).run().unwrap();
    let mut handles = Vec::new();
    for n in 1..=500u32 {
        handles.push((n % 7 + 1, engine.start("count", &(n % 7 + 1)).id(format!("w-{n}")).await.unwrap()));
    }
    for (expected, handle) in &handles {
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), *expected);
    }
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

async fn bulk_starts_are_each_answered_and_all_run(database: Database) {
    let engine = open(&database).register("count", count_up).run().unwrap();
    let mut requests: Vec<Request> = (0..2_000).map(|n| Request::new("count").id(format!("b-{n}")).input(&2)).collect();
    requests[7] = Request::new("count").id("b-6").input(&2);
    requests[8] = Request::new("count").id("b-6").input(&3);
    requests[9] = Request::new("count").id("x".repeat(129)).input(&2);
    let outcomes = engine.start_many(requests).await.unwrap();
    assert_eq!(outcomes.len(), 2_000);
    assert!(outcomes[7].as_ref().unwrap().replay);
    assert_eq!(outcomes[8].as_ref().unwrap_err().code(), "identity_conflict");
    assert_eq!(outcomes[9].as_ref().unwrap_err().code(), "invalid_id");
    for n in [0, 6, 1_999] {
        assert_eq!(within(engine.handle(&format!("b-{n}")).result::<u32>()).await.unwrap(), 2);
    }
    let too_many = vec![Request::new("count"); 10_001];
    assert_eq!(engine.start_many(too_many).await.unwrap_err().code(), "bulk_too_large");
    engine.shutdown(STUCK).await;
}

async fn no_more_workflows_run_at_once_than_there_is_room_for(database: Database) {
    let (running, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (r, m) = (running.clone(), most.clone());
    let handler = move |_: Ctx| {
        let (running, most) = (r.clone(), m.clone());
        async move {
            most.fetch_max(running.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            running.fetch_sub(1, Ordering::SeqCst);
            Ok(done(()))
        }
    };
    let engine = open(&database).register("busy", handler).concurrency(3).run().unwrap();
    let mut handles = Vec::new();
    for _ in 0..60 {
        handles.push(engine.start("busy", &()).await.unwrap());
    }
    for handle in handles {
        within(handle.result::<()>()).await.unwrap();
    }
    assert!((1..=3).contains(&most.load(Ordering::SeqCst)), "{most:?}");
    engine.shutdown(STUCK).await;
}

async fn a_graceful_shutdown_lets_a_step_finish_and_gives_the_rest_back_without_an_attempt(database: Database) {
    let url = database.url();
    let begun = Arc::new(Semaphore::new(0));
    let may_end = Arc::new(Notify::new());
    let (b, e) = (begun.clone(), may_end.clone());
    let handler = move |ctx: Ctx| {
        let (begun, may_end) = (b.clone(), e.clone());
        async move {
            begun.add_permits(1);
            if ctx.workflow_id() == "ends" {
                may_end.notified().await;
                Ok(step("second"))
            } else {
                std::future::pending::<StepResult>().await
            }
        }
    };
    let engine = Engine::open(&url).unwrap().register("waits", handler).run().unwrap();
    engine.start("waits", &()).id("ends").await.unwrap();
    engine.start("waits", &()).id("hangs").await.unwrap();
    within(begun.acquire_many(2)).await.unwrap().forget();
    // Told to stop first: its next step is not claimed any more.
    let shutdown = engine.shutdown(Duration::from_millis(200));
    let (drained, ()) = within(async { tokio::join!(biased; shutdown, async { may_end.notify_one() }) }).await;
    assert_eq!((drained.given_back, drained.left), (1, 0));
    assert!(drained.took >= Duration::from_millis(200), "the grace was its own: {drained:?}");

    let engine = Engine::open(&url).unwrap().concurrency(0).run().unwrap();
    let ends = engine.head("ends").await.unwrap();
    assert_eq!((ends.status(), ends.visit().unwrap().step.as_str()), (Status::Ready, "second"));
    let hangs = engine.head("hangs").await.unwrap();
    let visit = hangs.visit().unwrap();
    assert_eq!((hangs.status(), visit.attempt, visit.delivery), (Status::Ready, 1, 2));
    let key = hangs.key.clone();
    let last = engine.look(move |reader| reader.events(&key, 2, 1)).await.unwrap().pop().unwrap();
    assert!(matches!(last.event, Event::StepFailed { counts: false, ref code, .. } if code.as_str() == "given_back"));
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

/// The worker outlives its lease while the clock moves on; its step is handed out again, and what it brings in the end
/// is dropped without an error event.
async fn a_late_result_is_lost_quietly_and_the_handler_is_told(database: Database) {
    let clock = Arc::new(ManualClock::new(1_000_000));
    let store = by_clock(&database, clock.clone());
    let reader = store.reader();
    let late = Arc::new(Notify::new());
    let told = Arc::new(Notify::new());
    let (l, t) = (late.clone(), told.clone());
    let handler = move |ctx: Ctx| {
        let (late, told) = (l.clone(), t.clone());
        async move {
            if ctx.delivery() == 1 {
                late.notify_one();
                ctx.cancelled().await;
                assert!(ctx.is_cancelled());
                told.notify_one();
                ctx.set("who", "the late one")?;
                return Ok(done("late"));
            }
            ctx.set("who", "the second")?;
            Ok(done("in time"))
        }
    };
    let engine = Engine::on(store)
        .register("slow", handler)
        // The heartbeat goes by real time and comes long after the sweep, which finds the lease over by the store's
        // clock.
        .lease(Duration::from_secs(9))
        .run()
        .unwrap();
    let handle = engine.start("slow", &()).id("w").await.unwrap();
    within(late.notified()).await;
    clock.advance(9_001);
    assert_eq!(within(handle.result::<String>()).await.unwrap(), "in time");
    within(told.notified()).await;
    within(engine.clone().shutdown(STUCK)).await;
    let key = WorkflowKey {
        namespace: steadfast::core::text::Namespace::default_namespace(),
        id: steadfast::core::text::WorkflowId::trusted("w"),
    };
    let kinds: Vec<&str> = reader.events(&key, 0, 99).unwrap().iter().map(|logged| logged.event.kind()).collect();
    assert_eq!(
        kinds,
        ["workflow_created", "step_started", "step_failed", "step_started", "step_completed", "workflow_completed"]
    );
    let who = reader.variables(&key, None, 9).unwrap().pop().unwrap();
    assert_eq!(who.value.as_str(), "\"the second\"");
}

async fn a_heartbeat_keeps_a_long_step_and_shows_its_progress(database: Database) {
    let beaten = Arc::new(Notify::new());
    let go_on = Arc::new(Notify::new());
    let (b, g) = (beaten.clone(), go_on.clone());
    let handler = move |ctx: Ctx| {
        let (beaten, go_on) = (b.clone(), g.clone());
        async move {
            ctx.heartbeat(&"half way")?;
            beaten.notify_one();
            go_on.notified().await;
            assert!(!ctx.is_cancelled());
            Ok(done(ctx.delivery()))
        }
    };
    // A lease far shorter than the step: only its renewal lets the first delivery finish.
    let engine = open(&database).register("long", handler).lease(Duration::from_millis(300)).run().unwrap();
    let handle = engine.start("long", &()).id("l").await.unwrap();
    within(beaten.notified()).await;
    let first = engine.head("l").await.unwrap().claim.unwrap();
    within(async {
        loop {
            let claim = engine.head("l").await.unwrap().claim.expect("it is never taken away");
            if claim.lease_until > first.started_at + 1_500 {
                assert_eq!(claim.progress.unwrap().as_str(), "\"half way\"");
                break;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    go_on.notify_one();
    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 1);
    engine.shutdown(STUCK).await;
}

async fn an_attempt_that_takes_too_long_counts_and_frees_its_place(database: Database) {
    let handler = |ctx: Ctx| async move {
        if ctx.attempt() == 1 { std::future::pending::<StepResult>().await } else { Ok(done(ctx.attempt())) }
    };
    let definition = Definition::new("hangs", handler).step_timeout(Duration::from_millis(50));
    let engine = open(&database).define(definition).concurrency(1).run().unwrap();
    let handle = engine.start("hangs", &()).await.unwrap();
    assert_eq!(within(handle.result::<u32>()).await.unwrap(), 2);
    engine.shutdown(STUCK).await;
}

async fn a_cancel_reaches_a_running_step(database: Database) {
    let begun = Arc::new(Notify::new());
    let told = Arc::new(Notify::new());
    let (b, t) = (begun.clone(), told.clone());
    let handler = move |ctx: Ctx| {
        let (begun, told) = (b.clone(), t.clone());
        async move {
            begun.notify_one();
            ctx.cancelled().await;
            told.notify_one();
            Ok(done(()))
        }
    };
    let engine = open(&database).register("runs", handler).run().unwrap();
    let handle = engine.start("runs", &()).await.unwrap();
    within(begun.notified()).await;
    handle.cancel("enough").await.unwrap();
    // Long before its next heartbeat.
    tokio::time::timeout(Duration::from_secs(3), told.notified()).await.expect("it is told at once");
    let error = within(handle.result::<()>()).await.unwrap_err();
    assert_eq!(error.code(), "workflow_cancelled");
    engine.shutdown(STUCK).await;
}

async fn a_durable_sleep_ends_on_time_by_itself(database: Database) {
    let handler = |ctx: Ctx| async move {
        match ctx.step() {
            "start" => {
                ctx.set("slept_at", &1)?;
                Ok(step("awake").after(Duration::from_millis(200)))
            }
            _ => Ok(done(())),
        }
    };
    let engine = open(&database).register("sleeps", handler).run().unwrap();
    let begin = std::time::Instant::now();
    let handle = engine.start("sleeps", &()).await.unwrap();
    within(handle.result::<()>()).await.unwrap();
    let took = begin.elapsed();
    assert!(took >= Duration::from_millis(200), "{took:?}");
    // Told, not polled: well before the loop would have looked by itself.
    assert!(took < Duration::from_millis(900), "{took:?}");
    engine.shutdown(STUCK).await;
}

async fn a_full_beginning_lane_refuses_and_finishing_goes_on(database: Database) {
    // One place more than the loop that claims may take.
    let bounds = Bounds { begin_waiting: 2, ..Bounds::default() };
    let engine = open(&database).register("count", count_up).bounds(bounds).run().unwrap();
    let starts = (0..200).map(|n| engine.start_request(Request::new("count").id(format!("o-{n}")).input(&3)));
    let outcomes = futures_util::future::join_all(starts).await;
    let refused = outcomes.iter().filter(|outcome| matches!(outcome, Err(Error::Overloaded { .. }))).count();
    let accepted = outcomes.iter().flatten().count();
    assert_eq!(refused + accepted, 200, "every answer is one of the two");
    assert!(accepted >= 1);
    for accepted in outcomes.iter().flatten() {
        assert_eq!(within(engine.handle(accepted.id.as_str()).result::<u32>()).await.unwrap(), 3);
    }
    engine.shutdown(STUCK).await;
}

/// About the lock of a file; a store in PostgreSQL has any number of owners.
#[tokio::test(flavor = "multi_thread")]
async fn a_store_has_one_owner() {
    let database = Database::sqlite();
    let url = database.url();
    let engine = Engine::open(&url).unwrap().run().unwrap();
    assert_eq!(Engine::open(&url).unwrap_err().code(), "store_owned");
    engine.shutdown(STUCK).await;
    let engine = Engine::open(&url).expect("it was let go").run().unwrap();
    drop(engine);
}

async fn bad_definitions_and_stores_are_refused_with_their_field(database: Database) {
    let code = |error: Error| error.code();
    let twice = open(&database).register("a", count_up).register("a", count_up).run();
    assert_eq!(twice.map(drop).map_err(code), Err("invalid_name"));
    let unnamed = open(&database).register("", count_up).run();
    assert_eq!(unnamed.map(drop).map_err(code), Err("invalid_name"));
    let step = open(&database).define(Definition::new("a", count_up).steps(["a\nb"])).run();
    assert_eq!(step.map(drop).map_err(code), Err("invalid_step"));
    assert_eq!(Engine::open("mysql://x").map(drop).map_err(code), Err("invalid_store"));
}

/// A caller that goes away in the middle of a start: what was accepted still runs at once, not after a lease.
async fn a_caller_that_goes_away_leaves_no_claim_behind(database: Database) {
    let engine = open(&database).register("count", count_up).run().unwrap();
    for n in 0..200 {
        let call = engine.start_request(Request::new("count").id(format!("g-{n}")).input(&1));
        // Polled once, so that it is sent, and then dropped.
        let mut call = Box::pin(call);
        let sent = futures_util::poll!(&mut call);
        assert!(sent.is_pending());
    }
    for n in 0..200 {
        let handle = engine.handle(&format!("g-{n}"));
        let found = within(async {
            loop {
                match handle.result::<u32>().await {
                    Err(Error::UnknownWorkflow { .. }) => tokio::task::yield_now().await,
                    other => break other,
                }
            }
        });
        assert_eq!(
            tokio::time::timeout(Duration::from_secs(10), found).await.expect("it waits for a lease").unwrap(),
            1
        );
    }
    engine.shutdown(STUCK).await;
}

/// Places are all taken when more becomes ready: whoever frees one looks for it at once.
async fn what_became_ready_while_all_places_were_taken_does_not_wait_for_a_poll(database: Database) {
    let engine = open(&database).register("count", count_up).concurrency(1).run().unwrap();
    let begin = std::time::Instant::now();
    let starts = (0..20).map(|n| engine.start_request(Request::new("count").id(format!("p-{n}")).input(&3)));
    for accepted in futures_util::future::join_all(starts).await {
        let handle = engine.handle(accepted.unwrap().id.as_str());
        assert_eq!(within(handle.result::<u32>()).await.unwrap(), 3);
    }
    assert!(begin.elapsed() < Duration::from_secs(5), "{:?}", begin.elapsed());
    engine.shutdown(STUCK).await;
}

/// PostgreSQL takes no zero byte in a text: a cancel of such an id made it refuse the commands of others that came with it.
async fn an_id_that_no_workflow_can_have_is_refused_before_the_store_is_asked(database: Database) {
    let engine = open(&database).register("count", count_up).run().unwrap();
    let code = |error: Error| error.code();
    for id in ["w\0", "", ".."] {
        assert_eq!(engine.head(id).await.map_err(code).unwrap_err(), "invalid_id");
        assert_eq!(engine.end(id).await.map_err(code).unwrap_err(), "invalid_id");
        assert_eq!(engine.cancel(id, "why", "test").await.map_err(code).unwrap_err(), "invalid_id");
        assert_eq!(within(engine.handle(id).result::<u32>()).await.map_err(code).unwrap_err(), "invalid_id");
    }
    engine.shutdown(STUCK).await;
}
