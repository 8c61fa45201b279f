//! Signals to real engines: none lost, none doubled, in order, whenever they come.

use std::sync::Arc;
use std::time::Duration;

use steadfast::core::state::Status;
use steadfast::{Ctx, Engine, Error, Signal, StepResult, done, fail, step, wait_for, wait_for_any};
use steadfast_pgtest::{Database, on_each_database};
use tokio::sync::Notify;

on_each_database! {
    #[tokio::test(flavor = "multi_thread")] async:
    a_workflow_goes_on_with_the_signal_it_waits_for,
    a_signal_during_a_step_is_there_when_the_step_waits,
    signals_of_a_name_keep_their_order_and_none_is_lost_or_doubled,
    of_callers_that_send_one_id_together_one_is_accepted,
    a_wait_that_times_out_goes_the_other_way,
    a_wait_that_means_nothing_fails_for_good,
    several_nodes_and_many_senders,
}

const STUCK: Duration = Duration::from_secs(60);

async fn within<F: IntoFuture>(work: F) -> F::Output {
    tokio::time::timeout(STUCK, work.into_future()).await.expect("it is done in time")
}

async fn verify(engine: &Engine) {
    let verified = engine.look(|reader| reader.verify(&mut |_| {})).await.expect("it can be verified");
    assert_eq!(verified.fault_count, 0, "{:?}", verified.faults);
}

/// Waits until the workflow stands like this.
async fn stands(engine: &Engine, id: &str, status: Status) {
    let there = async {
        while engine.head(id).await.unwrap().status() != status {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(there).await;
}

/// Asks for a payment, and tells what came.
async fn order(ctx: Ctx) -> StepResult {
    match ctx.step() {
        "start" => {
            assert_eq!(ctx.signal().await?, None, "it has not waited yet");
            Ok(wait_for_any(["paid", "void"]).then("settle"))
        }
        "settle" => {
            let Some(signal) = ctx.signal().await? else { return Ok(fail("no_signal", "there is none")) };
            ctx.set("by", &signal.name)?;
            Ok(step("tell").after(Duration::from_millis(10)))
        }
        _ => {
            assert_eq!(ctx.signal().await?, None, "this step did not wait");
            let by: String = ctx.get("by").await?.unwrap_or_default();
            Ok(done((by.clone(), ctx.get::<u64>(&format!("signal:{by}")).await?)))
        }
    }
}

async fn a_workflow_goes_on_with_the_signal_it_waits_for(database: Database) {
    let engine = Engine::open(&database.url()).unwrap().register("order", order).run().unwrap();
    let handle = engine.start("order", &()).id("one").await.unwrap();
    stands(&engine, "one", Status::Waiting).await;
    let sent = handle.signal(Signal::new("paid").payload(&250).id("evt-1")).await.unwrap();
    assert_eq!((sent.id.as_str(), sent.replay), ("evt-1", false));
    assert_eq!(within(handle.result::<(String, u64)>()).await.unwrap(), ("paid".to_owned(), 250));
    // Whatever has become of the workflow, a repeat is told the truth.
    assert!(handle.signal(Signal::new("paid").payload(&250).id("evt-1")).await.unwrap().replay);
    let conflict = handle.signal(Signal::new("paid").payload(&251).id("evt-1")).await.unwrap_err();
    assert!(matches!(conflict, Error::SignalConflict { .. }), "{conflict}");
    let late = handle.signal(Signal::new("paid")).await.unwrap_err();
    assert!(matches!(late, Error::WorkflowFinished { status: Status::Completed, .. }), "{late}");
    let nobody = engine.signal("nobody", Signal::new("paid")).await.unwrap_err();
    assert!(matches!(nobody, Error::UnknownWorkflow { .. }), "{nobody}");
    for (signal, code) in [
        (Signal::new(""), "invalid_signal"),
        (Signal::new("paid").id(""), "invalid_id"),
        (Signal::new("paid").payload(&"x".repeat(1 << 20)), "value_too_large"),
    ] {
        assert_eq!(engine.signal("one", signal).await.unwrap_err().code(), code);
    }
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

async fn a_signal_during_a_step_is_there_when_the_step_waits(database: Database) {
    let (entered, goes_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (tell, wait) = (entered.clone(), goes_on.clone());
    let busy = move |ctx: Ctx| {
        let (tell, wait) = (tell.clone(), wait.clone());
        async move {
            if let Some(signal) = ctx.signal().await? {
                return Ok(done(signal.payload::<String>()?));
            }
            tell.notify_one();
            wait.notified().await;
            Ok(wait_for("word").then("start"))
        }
    };
    let engine = Engine::open(&database.url()).unwrap().register("busy", busy).run().unwrap();
    let handle = engine.start("busy", &()).await.unwrap();
    within(entered.notified()).await;
    handle.signal(Signal::new("word").payload("early")).await.unwrap();
    let head = engine.head(handle.id()).await.unwrap();
    assert_eq!((head.status(), head.seq), (Status::Running, 1), "neither log nor head has heard of it");
    goes_on.notify_one();
    assert_eq!(within(handle.result::<String>()).await.unwrap(), "early");
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

/// Takes so many ticks and answers what they carried.
async fn count(ctx: Ctx) -> StepResult {
    let n: usize = ctx.input().await?;
    let mut seen: Vec<u32> = ctx.get("seen").await?.unwrap_or_default();
    if let Some(signal) = ctx.signal().await? {
        seen.push(signal.payload()?);
        ctx.set("seen", &seen)?;
    }
    Ok(if seen.len() == n { done(seen) } else { wait_for("tick").then("start") })
}

async fn signals_of_a_name_keep_their_order_and_none_is_lost_or_doubled(database: Database) {
    let engine = Engine::open(&database.url()).unwrap().register("count", count).run().unwrap();
    let handle = engine.start("count", &60).await.unwrap();
    for n in 0..60 {
        let tick = || Signal::new("tick").id(format!("t{n}")).payload(&n);
        assert!(!handle.signal(tick()).await.unwrap().replay);
        assert!(handle.signal(tick()).await.unwrap().replay);
        if n % 7 == 0 {
            tokio::time::sleep(Duration::from_millis(3)).await;
        }
    }
    assert_eq!(within(handle.result::<Vec<u32>>()).await.unwrap(), (0..60).collect::<Vec<_>>());
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

async fn of_callers_that_send_one_id_together_one_is_accepted(database: Database) {
    let engine = Engine::open(&database.url()).unwrap().register("count", count).run().unwrap();
    let handle = engine.start("count", &20).await.unwrap();
    for n in 0..20 {
        let twins = (0..8).map(|_| handle.signal(Signal::new("tick").id(format!("t{n}")).payload(&n)));
        let told = futures_util::future::join_all(twins).await;
        let new = told.into_iter().filter(|sent| !sent.as_ref().expect("it is accepted").replay).count();
        assert_eq!(new, 1);
    }
    assert_eq!(within(handle.result::<Vec<u32>>()).await.unwrap(), (0..20).collect::<Vec<_>>());
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

async fn a_wait_that_times_out_goes_the_other_way(database: Database) {
    async fn patient(ctx: Ctx) -> StepResult {
        Ok(match ctx.step() {
            "start" => wait_for("word").then("heard").timeout(Duration::from_millis(50), "unheard"),
            "unheard" => {
                assert_eq!(ctx.signal().await?, None);
                wait_for("word").then("heard").timeout_at(0, "again")
            }
            "again" => wait_for("word").then("heard").timeout(Duration::from_secs(3600), "never"),
            "heard" => done(ctx.signal().await?.map(|signal| signal.name)),
            _ => return Err(ctx.unknown_step()),
        })
    }
    let engine = Engine::open(&database.url()).unwrap().register("patient", patient).run().unwrap();
    let handle = engine.start("patient", &()).id("p").await.unwrap();
    let over = async {
        loop {
            let head = engine.head("p").await.unwrap();
            if head.status() == Status::Waiting && head.visit().is_some_and(|visit| visit.visit == 4) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    within(over).await;
    handle.signal(Signal::new("word")).await.unwrap();
    assert_eq!(within(handle.result::<Option<String>>()).await.unwrap().as_deref(), Some("word"));
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

async fn a_wait_that_means_nothing_fails_for_good(database: Database) {
    async fn odd(ctx: Ctx) -> StepResult {
        let input: u32 = ctx.input().await?;
        Ok(match input {
            0 => wait_for("").then("next"),
            1 => wait_for("word").then(""),
            2 => wait_for_any(Vec::<String>::new()).then("next"),
            3 => wait_for_any((0..33).map(|n| n.to_string())).then("next"),
            4 => wait_for_any(["word", "word"]).then("next"),
            5 => wait_for("word").then("next").after(Duration::from_secs(1)),
            6 => step("next").timeout(Duration::from_secs(1), "over"),
            7 => wait_for("word").then("next").timeout(Duration::MAX, "over"),
            8 => wait_for("word").then("next").timeout(Duration::from_secs(1), ""),
            _ => {
                ctx.set("signal:word", &1)?;
                done(())
            }
        })
    }
    let engine = Engine::open(&database.url()).unwrap().register("odd", odd).run().unwrap();
    for n in 0..10 {
        let handle = engine.start("odd", &n).await.unwrap();
        let Err(Error::WorkflowFailed { failure, reason }) = within(handle.result::<()>()).await else {
            panic!("{n} does not fail")
        };
        let expected = if n == 9 { "invalid_key" } else { "invalid_continuation" };
        assert_eq!(failure, expected, "{n}: {reason}");
    }
    verify(&engine).await;
    engine.shutdown(STUCK).await;
}

/// Senders on every node, workflows on any of them.
async fn several_nodes_and_many_senders(database: Database) {
    let open = || Engine::open(&database.url()).unwrap().register("count", count).concurrency(4).run().unwrap();
    // One process owns a file.
    let nodes: Vec<Engine> = if database.file().is_some() { vec![open()] } else { vec![open(), open(), open()] };
    for n in 0..12 {
        nodes[n % nodes.len()].start("count", &30).id(format!("w{n}")).await.unwrap();
    }
    let senders = (0..12).map(|n| {
        let nodes = &nodes;
        async move {
            for tick in 0..30 {
                // Each by another node, and now and then by two.
                for copy in 0..1 + usize::from(tick % 5 == 0) {
                    let node = &nodes[(n + tick + copy) % nodes.len()];
                    let signal = Signal::new("tick").id(format!("t{tick}")).payload(&tick);
                    node.signal(&format!("w{n}"), signal).await.unwrap();
                }
            }
        }
    });
    within(futures_util::future::join_all(senders)).await;
    for n in 0..12 {
        let seen: Vec<u32> = within(nodes[0].handle(&format!("w{n}")).result()).await.unwrap();
        assert_eq!(seen, (0..30).collect::<Vec<_>>(), "w{n}");
    }
    verify(&nodes[0]).await;
    for node in nodes {
        node.shutdown(STUCK).await;
    }
}
