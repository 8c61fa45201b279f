//! Workflows under a test's control: time, failures, crashes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use steadfast::core::commit::Outcome;
use steadfast::core::state::Status;
use steadfast::store::faults::Fault;
use steadfast::testkit::{CrashPoint, TestKit};
use steadfast::{
    Cancelled, Ctx, Definition, End, Error, Failure, Limits, Request, RetryPolicy, Signal, StepResult, done, fail,
    step, wait_for,
};

fn steady() -> RetryPolicy {
    RetryPolicy { jitter_percent: 0, ..RetryPolicy::default() }
}

async fn sum(ctx: Ctx) -> StepResult {
    let n: u64 = ctx.input().await?;
    let total = ctx.get::<u64>("total").await?.unwrap_or(0);
    let at: u64 = if ctx.step() == "start" { 1 } else { ctx.step().parse()? };
    ctx.set("total", &(total + at))?;
    if at == n { Ok(done(total + at)) } else { Ok(step((at + 1).to_string())) }
}

#[tokio::test]
async fn a_workflow_runs_step_by_step_to_its_result() -> Result<(), Error> {
    let mut kit = TestKit::new([Definition::new("sum", sum)])?;
    let id = kit.start("sum", &3).await?;
    let mut seen = Vec::new();
    while let Some(ran) = kit.step().await? {
        seen.push(ran.step);
    }
    assert_eq!(seen, ["start", "2", "3"]);
    assert_eq!(kit.result::<u64>(&id).await?, 6);
    assert_eq!(
        kit.timeline(&id)?,
        "workflow_created step_started step_completed step_started step_completed step_started step_completed workflow_completed"
    );
    kit.verify()
}

#[tokio::test]
async fn a_thirty_day_sleep_takes_no_time_and_ends_at_its_instant() -> Result<(), Error> {
    async fn sleeper(ctx: Ctx) -> StepResult {
        match ctx.step() {
            "start" => Ok(step("wake").after(Duration::from_secs(30 * 86_400))),
            _ => Ok(done("awake")),
        }
    }
    let mut kit = TestKit::new([Definition::new("sleeper", sleeper)])?;
    let id = kit.start("sleeper", &()).await?;
    let begin = kit.now();
    kit.step().await?;
    assert_eq!(kit.head(&id).await?.status(), Status::Sleeping);
    kit.advance(Duration::from_secs(30 * 86_400) - Duration::from_millis(1)).await?;
    assert!(kit.step().await?.is_none(), "not a millisecond early");
    // BC-010: restarts in between leave the one timer where it is.
    kit.restart(false).await?;
    kit.advance(Duration::from_millis(1)).await?;
    assert_eq!(kit.result::<String>(&id).await?, "awake");
    assert_eq!(kit.now() - begin, 30 * 86_400_000);
    kit.verify()
}

#[tokio::test]
async fn a_failed_attempt_leaves_nothing_and_is_tried_again() -> Result<(), Error> {
    async fn flaky(ctx: Ctx) -> StepResult {
        ctx.set("seen_by_nobody", &ctx.attempt())?;
        if ctx.attempt() < 3 {
            return Err(Failure::retryable("flaky", "not yet"));
        }
        ctx.unset("seen_by_nobody")?;
        Ok(done(ctx.attempt()))
    }
    let mut kit = TestKit::new([Definition::new("flaky", flaky).retry(steady())])?;
    let id = kit.start("flaky", &()).await?;
    kit.step().await?;
    assert_eq!(kit.head(&id).await?.status(), Status::Backoff);
    assert_eq!(kit.variables(&id)?.len(), 1, "only the input");
    let failed_at = kit.now();
    assert_eq!(kit.result::<u32>(&id).await?, 3);
    assert_eq!(kit.now() - failed_at, 500 + 1_000);
    kit.verify()
}

#[tokio::test]
async fn attempts_run_out_and_terminal_failures_do_not_wait_for_it() -> Result<(), Error> {
    async fn hopeless(ctx: Ctx) -> StepResult {
        match ctx.input::<String>().await?.as_str() {
            "retry" => Err(std::io::Error::other("no luck").into()),
            "returned" => Ok(fail("no_stock", "sold out")),
            "wrong input" => ctx.get::<u8>("input").await.map(done),
            _ => Err(Failure::terminal("bad", "never")),
        }
    }
    let retry = RetryPolicy { attempts_max: 2, ..steady() };
    let mut kit = TestKit::new([Definition::new("hopeless", hopeless).retry(retry)])?;
    for (input, code, attempts) in [
        ("retry", "attempts_exhausted", 2),
        ("returned", "no_stock", 1),
        ("wrong input", "invalid_value", 1),
        ("", "bad", 1),
    ] {
        let id = kit.start("hopeless", input).await?;
        let End::Failed { code: found, .. } = kit.end(&id).await? else { panic!("{input} did not fail") };
        assert_eq!(found, code, "{input}");
        let starts = kit.timeline(&id)?.matches("step_started").count();
        assert_eq!(starts, attempts, "{input}");
    }
    kit.verify()
}

#[tokio::test]
async fn a_panic_is_a_failed_attempt_and_the_process_lives_on() -> Result<(), Error> {
    async fn panics(ctx: Ctx) -> StepResult {
        assert!(ctx.attempt() > 1, "the first attempt panics");
        Ok(done(()))
    }
    let mut kit = TestKit::new([Definition::new("panics", panics)])?;
    let id = kit.start("panics", &()).await?;
    assert_eq!(kit.end(&id).await?, End::Completed(steadfast::Json::null()));
    let events = kit.events(&id)?;
    let steadfast::core::event::Event::StepFailed { code, reason, counts, .. } = &events[2].event else {
        panic!("the second event is the failure: {:?}", events[2])
    };
    assert_eq!((code.as_str(), reason.as_str(), *counts), ("panic", "the first attempt panics", true));
    kit.verify()
}

/// The effect of a step happens with the handler; its record with the commit. Whatever the point of the crash, the
/// record is there once.
#[tokio::test]
async fn a_crash_at_any_point_costs_no_attempt_and_doubles_no_commit() -> Result<(), Error> {
    for point in [CrashPoint::BeforeHandler, CrashPoint::BeforeCommit, CrashPoint::AfterCommit] {
        let ran = Arc::new(AtomicU32::new(0));
        let counted = ran.clone();
        let token = Arc::new(std::sync::Mutex::new(Vec::new()));
        let tokens = token.clone();
        let handler = move |ctx: Ctx| {
            let (counted, tokens) = (counted.clone(), tokens.clone());
            async move {
                counted.fetch_add(1, Ordering::SeqCst);
                tokens.lock().unwrap().push(ctx.effect_token());
                assert_eq!(ctx.attempt(), 1, "a crash is no attempt");
                let n = ctx.get::<u32>("n").await?.unwrap_or(0);
                ctx.set("n", &(n + 1))?;
                Ok(done(n + 1))
            }
        };
        let mut kit = TestKit::new([Definition::new("once", handler)])?;
        let id = kit.start("once", &()).await?;
        kit.crash(point).await?;
        assert_eq!(kit.result::<u32>(&id).await?, 1, "{point:?}");
        let runs = ran.load(Ordering::SeqCst);
        assert_eq!(runs, if point == CrashPoint::BeforeCommit { 2 } else { 1 }, "{point:?}");
        let tokens = token.lock().unwrap().clone();
        assert!(tokens.iter().all(|token| *token == tokens[0]), "the same token on every delivery: {tokens:?}");
        kit.verify()?;
    }
    Ok(())
}

#[tokio::test]
async fn a_worker_killer_stops_after_so_many_deliveries() -> Result<(), Error> {
    let mut kit = TestKit::new([Definition::new("sum", sum)])?;
    let id = kit.start("sum", &1).await?;
    for _ in 0..20 {
        assert_eq!(kit.engine().end(&id).await?, None);
        kit.crash(CrashPoint::BeforeHandler).await?;
    }
    let End::Failed { code, .. } = kit.end(&id).await? else { panic!("it still runs") };
    assert_eq!(code, "deliveries_exhausted");
    kit.verify()
}

#[tokio::test]
async fn a_restored_store_voids_its_claims() -> Result<(), Error> {
    let mut kit = TestKit::new([Definition::new("sum", sum)])?;
    let id = kit.start("sum", &2).await?;
    kit.step().await?;
    kit.restart(true).await?;
    assert_eq!(kit.result::<u64>(&id).await?, 3);
    kit.verify()
}

#[tokio::test]
async fn an_unknown_commit_is_asked_again_and_its_handler_does_not_run_again() -> Result<(), Error> {
    for fault in [Fault::UnknownWritten, Fault::UnknownNotWritten, Fault::NotCommitted] {
        let ran = Arc::new(AtomicU32::new(0));
        let counted = ran.clone();
        let handler = move |ctx: Ctx| {
            let counted = counted.clone();
            async move {
                counted.fetch_add(1, Ordering::SeqCst);
                ctx.set("done", &true)?;
                Ok(done("result"))
            }
        };
        let mut kit = TestKit::new([Definition::new("once", handler)])?;
        let id = kit.start("once", &()).await?;
        // The claim passes, the commit meets the fault.
        kit.faults().add([Fault::Pass, fault]);
        let ran_step = kit.step().await?;
        let outcome = ran_step.expect("the step was ready").outcome;
        let expected = if fault == Fault::UnknownWritten {
            matches!(outcome, Outcome::AlreadyCommitted(_))
        } else {
            matches!(outcome, Outcome::Committed(_))
        };
        assert!(expected, "{fault:?}: {outcome:?}");
        assert_eq!(kit.faults().left(), 0, "{fault:?} was met");
        assert_eq!(ran.load(Ordering::SeqCst), 1, "{fault:?}");
        assert_eq!(kit.result::<String>(&id).await?, "result");
        kit.verify()?;
    }
    Ok(())
}

#[tokio::test]
async fn a_start_of_unknown_outcome_tells_the_truth_when_repeated() -> Result<(), Error> {
    for (fault, replay) in [(Fault::UnknownWritten, true), (Fault::UnknownNotWritten, false)] {
        let kit = TestKit::new([Definition::new("sum", sum)])?;
        let request = || Request::new("sum").id("one").input(&1);
        kit.faults().add([fault]);
        let error = kit.engine().start_request(request()).await.unwrap_err();
        assert_eq!(error.code(), "outcome_unknown");
        assert!(matches!(&error, Error::OutcomeUnknown { id: Some(id) } if id.as_str() == "one"));
        assert_eq!(kit.engine().start_request(request()).await?.replay, replay, "{fault:?}");
        kit.verify()?;
    }
    Ok(())
}

#[tokio::test]
async fn one_bad_batch_is_run_command_by_command() -> Result<(), Error> {
    let kit = TestKit::new([Definition::new("sum", sum)])?;
    kit.faults().add([Fault::NotCommitted, Fault::NotCommitted]);
    let requests = (0..3).map(|n| Request::new("sum").id(format!("w{n}")).input(&1)).collect();
    let outcomes = kit.engine().start_many(requests).await?;
    let failed: Vec<&str> = outcomes.iter().filter_map(|outcome| outcome.as_ref().err().map(Error::code)).collect();
    assert!(failed.len() <= 1, "one fault, one command told: {failed:?}");
    kit.verify()
}

#[tokio::test]
async fn the_same_id_is_a_replay_and_other_content_a_conflict() -> Result<(), Error> {
    let mut kit = TestKit::new([Definition::new("sum", sum)])?;
    let request = |n: u32| Request::new("sum").id("s-1").input(&n);
    assert!(!kit.engine().start_request(request(1)).await?.replay);
    assert!(kit.engine().start_request(request(1)).await?.replay);
    kit.end("s-1").await?;
    assert!(kit.engine().start_request(request(1)).await?.replay, "also when it has finished");
    let error = kit.engine().start_request(request(2)).await.unwrap_err();
    assert_eq!(error.code(), "identity_conflict");
    // Numbers are compared by their exact value.
    let spelled = Request::new("sum").id("s-1").input_json(steadfast::Json::parse("1.0").unwrap());
    assert!(kit.engine().start_request(spelled).await?.replay);
    kit.verify()
}

#[tokio::test]
async fn cancel_says_what_it_did() -> Result<(), Error> {
    let mut kit = TestKit::new([Definition::new("sum", sum)])?;
    assert_eq!(kit.cancel("nobody").await?, Cancelled::Unknown);
    let id = kit.start("sum", &2).await?;
    kit.step().await?;
    assert_eq!(kit.cancel(&id).await?, Cancelled::Cancelled);
    assert_eq!(kit.cancel(&id).await?, Cancelled::AlreadyFinished { status: Status::Cancelled });
    assert!(kit.step().await?.is_none());
    let error = kit.engine().handle(&id).result::<u64>().await.unwrap_err();
    assert_eq!(error.code(), "workflow_cancelled");
    kit.verify()
}

#[tokio::test]
async fn an_unknown_step_blocks_and_costs_no_attempt() -> Result<(), Error> {
    async fn old(ctx: Ctx) -> StepResult {
        match ctx.step() {
            "start" => Ok(step("renamed")),
            _ => Err(ctx.unknown_step()),
        }
    }
    let mut kit = TestKit::new([Definition::new("open", old), Definition::new("listed", old).steps(["start"])])?;
    let open = kit.start("open", &()).await?;
    let listed = kit.start("listed", &()).await?;
    while kit.step().await?.is_some() {}
    for (id, deliveries) in [(&open, 2), (&listed, 1)] {
        let head = kit.head(id).await?;
        assert!(kit.engine().is_blocked(&head), "{id}");
        let visit = head.visit().unwrap();
        assert_eq!((visit.attempt, visit.delivery), (1, deliveries), "{id}");
    }
    kit.verify()
}

#[tokio::test]
async fn what_is_over_a_limit_fails_the_step_for_good_and_saves_nothing() -> Result<(), Error> {
    async fn greedy(ctx: Ctx) -> StepResult {
        let limits = Limits::default();
        ctx.set("small", &1)?;
        match ctx.input::<String>().await?.as_str() {
            "value" => ctx.set("big", &"x".repeat(limits.value_bytes_max - 1))?,
            "value fits" => ctx.set("big", &"x".repeat(limits.value_bytes_max - 2))?,
            "key" => ctx.set(&"k".repeat(257), &1)?,
            "writes" => {
                for n in 0..5 {
                    ctx.set(&format!("k{n}"), &"x".repeat(900_000))?;
                }
            }
            "signal" => ctx.set("signal:x", &1)?,
            "input" => ctx.set("input", &1)?,
            "result" => return Ok(done("x".repeat(limits.value_bytes_max))),
            "step" => return Ok(step("s".repeat(129))),
            "empty step" => return Ok(step("")),
            "far" => return Ok(step("next").after(Duration::from_secs(11 * 31_557_600))),
            "waiting end" => return Ok(done(1).after(Duration::from_secs(1))),
            other => panic!("{other}"),
        }
        Ok(done(()))
    }
    let mut kit = TestKit::new([Definition::new("greedy", greedy)])?;
    for (input, code) in [
        ("value", "value_too_large"),
        ("value fits", ""),
        ("key", "invalid_key"),
        ("writes", "writes_too_large"),
        ("signal", "invalid_key"),
        ("input", "invalid_key"),
        ("result", "value_too_large"),
        ("step", "invalid_continuation"),
        ("empty step", "invalid_continuation"),
        ("far", "invalid_continuation"),
        ("waiting end", "invalid_continuation"),
    ] {
        let id = kit.start("greedy", input).await?;
        match kit.end(&id).await? {
            End::Failed { code: found, .. } => {
                assert_eq!(found, code, "{input}");
                assert_eq!(kit.variables(&id)?.len(), 1, "{input}: only the input is there");
            }
            _ => assert_eq!(code, "", "{input} completed"),
        }
    }
    kit.verify()
}

#[tokio::test]
async fn json_comes_back_byte_for_byte() -> Result<(), Error> {
    async fn echo(ctx: Ctx) -> StepResult {
        let input = ctx.json("input").await?.unwrap();
        ctx.set_json("copy", input.clone())?;
        Ok(done(input))
    }
    let mut kit = TestKit::new([Definition::new("echo", echo)])?;
    let text = r#"{"big":9007199254740993,"tenth":0.10,"exp":1e2,"nul":"a\u0000b","z":null,"a":[1.0,-0]}"#;
    let id = kit.start_request(Request::new("echo").input_json(steadfast::Json::parse(text).unwrap())).await?;
    let End::Completed(result) = kit.end(&id).await? else { panic!("it failed") };
    assert_eq!(result.as_str(), text);
    assert!(kit.variables(&id)?.iter().all(|variable| variable.value.as_str() == text));
    kit.verify()
}

#[tokio::test]
async fn signals_and_their_timeouts_are_told_by_a_test() -> Result<(), Error> {
    async fn approval(ctx: Ctx) -> StepResult {
        Ok(match ctx.step() {
            "start" => wait_for("approve").then("approved").timeout(Duration::from_secs(30 * 86_400), "remind"),
            "remind" => wait_for("approve").then("approved"),
            _ => {
                if ctx.attempt() == 1 {
                    return Err(Failure::retryable("busy", "once more"));
                }
                done(ctx.signal().await?.map(|signal| signal.payload::<String>()).transpose()?)
            }
        })
    }
    let mut kit = TestKit::new([Definition::new("approval", approval).retry(steady())])?;
    let id = kit.start("approval", &()).await?;
    kit.step().await?;
    assert_eq!(kit.head(&id).await?.status(), Status::Waiting);
    kit.restart(true).await?;
    kit.advance(Duration::from_secs(30 * 86_400)).await?;
    kit.step().await?;
    assert!(kit.step().await?.is_none(), "it waits without an end");
    let stuck = kit.end(&id).await.unwrap_err();
    assert!(stuck.to_string().contains("waits for nothing that could end it"), "{stuck}");
    kit.signal(&id, Signal::new("approve").payload("by hand")).await?;
    kit.crash(CrashPoint::BeforeCommit).await?;
    // Every attempt of the step sees it.
    assert_eq!(kit.result::<Option<String>>(&id).await?.as_deref(), Some("by hand"));
    assert_eq!(
        kit.timeline(&id)?,
        "workflow_created step_started step_completed wait_timed_out step_started step_completed signal_received \
         step_started step_failed step_started step_failed step_started step_completed workflow_completed"
    );
    kit.verify()
}
