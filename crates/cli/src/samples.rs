//! Samples: definitions that a newcomer can start at once.

use std::time::Duration;

use serde::Deserialize;
use steadfast::{Ctx, Definition, Failure, RetryPolicy, StepResult, done, fail, step, wait_for, wait_for_any};

/// What `dev` registers, with an input to try each with.
pub fn all() -> Vec<(Definition, &'static str, &'static str)> {
    vec![
        (Definition::new("hello", hello), r#"{"steps": 3}"#, "makes so many steps and says hello"),
        (
            Definition::new("flaky", flaky).retry(RetryPolicy {
                attempts_max: 101,
                first_delay_ms: 50,
                max_delay_ms: 2_000,
                ..RetryPolicy::default()
            }),
            r#"{"failures": 2}"#,
            "fails so often, then succeeds",
        ),
        (Definition::new("sleeper", sleeper), r#"{"seconds": 10}"#, "sleeps durably: stop the server meanwhile"),
        (
            Definition::new("approval", approval),
            r#"{"seconds": 600}"#,
            "waits for a signal: steadfast signal ID approve (or reject)",
        ),
        (
            Definition::new("tally", tally),
            r#"{"signals": 3}"#,
            "takes so many signals named tick, and lists what they carry",
        ),
        (crate::demo::flight_definition(), r#"{"row": 1}"#, "imports one of the demo's flights"),
    ]
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Hello {
    #[serde(default = "three")]
    steps: u32,
}

fn three() -> u32 {
    3
}

/// Reads an input, or says in words what it should have been.
pub async fn input<T: serde::de::DeserializeOwned>(ctx: &Ctx, example: &str) -> Result<T, Failure> {
    ctx.input::<T>().await.map_err(|failure| {
        if failure.code() == "invalid_value" {
            Failure::terminal("invalid_input", format!("the input is not like {example}"))
        } else {
            failure
        }
    })
}

/// The steps are named `start`, `2`, `3`, ..: `made` of them when this one is done.
async fn hello(ctx: Ctx) -> StepResult {
    // No input at all is the simplest of hellos.
    let steps = input::<Option<Hello>>(&ctx, r#"{"steps": 3}"#).await?.map_or_else(three, |hello| hello.steps);
    if !(1..=1_000_000).contains(&steps) {
        return Ok(fail("invalid_input", "steps is not between 1 and 1000000"));
    }
    let made = if ctx.step() == "start" { 1 } else { ctx.step().parse::<u32>().map_err(|_| ctx.unknown_step())? };
    ctx.set("made", &made)?;
    if made < steps {
        return Ok(step((made + 1).to_string()));
    }
    Ok(done(serde_json::json!({ "hello": ctx.workflow_id(), "steps": made })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Flaky {
    failures: u32,
}

async fn flaky(ctx: Ctx) -> StepResult {
    let Flaky { failures } = input(&ctx, r#"{"failures": 2}"#).await?;
    if failures > 100 {
        return Ok(fail("invalid_input", "failures is over 100"));
    }
    if ctx.attempt() <= failures {
        return Err(Failure::retryable("flaky", format!("attempt {} fails, as asked", ctx.attempt())));
    }
    Ok(done(serde_json::json!({ "attempts": ctx.attempt() })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Sleeper {
    seconds: f64,
    #[serde(default = "once")]
    times: u32,
}

fn once() -> u32 {
    1
}

async fn sleeper(ctx: Ctx) -> StepResult {
    let Sleeper { seconds, times } = input(&ctx, r#"{"seconds": 10}"#).await?;
    let Ok(sleep) = Duration::try_from_secs_f64(seconds) else {
        return Ok(fail("invalid_input", "seconds is not a length of time"));
    };
    let slept = if ctx.step() == "start" { 0 } else { ctx.step().parse::<u32>().map_err(|_| ctx.unknown_step())? };
    ctx.set("slept", &slept)?;
    if slept < times {
        return Ok(step((slept + 1).to_string()).after(sleep));
    }
    Ok(done(serde_json::json!({ "slept": slept })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Approval {
    seconds: f64,
}

async fn approval(ctx: Ctx) -> StepResult {
    let Approval { seconds } = input(&ctx, r#"{"seconds": 600}"#).await?;
    let Ok(patience) = Duration::try_from_secs_f64(seconds) else {
        return Ok(fail("invalid_input", "seconds is not a length of time"));
    };
    match ctx.step() {
        "start" => Ok(wait_for_any(["approve", "reject"]).then("answered").timeout(patience, "unanswered")),
        "answered" => {
            let Some(signal) = ctx.signal().await? else { return Ok(fail("no_signal", "nobody has answered")) };
            Ok(done(serde_json::json!({ "answer": signal.name, "with": signal.payload::<serde_json::Value>()? })))
        }
        "unanswered" => Ok(done(serde_json::json!({ "answer": null }))),
        _ => Err(ctx.unknown_step()),
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Tally {
    signals: usize,
}

async fn tally(ctx: Ctx) -> StepResult {
    let Tally { signals } = input(&ctx, r#"{"signals": 3}"#).await?;
    if signals > 1_000 {
        return Ok(fail("invalid_input", "signals is over 1000"));
    }
    let mut taken: Vec<serde_json::Value> = ctx.get("taken").await?.unwrap_or_default();
    match ctx.step() {
        "start" => {}
        "next" => {
            let Some(signal) = ctx.signal().await? else { return Ok(fail("no_signal", "nothing was sent")) };
            taken.push(signal.payload()?);
            ctx.set("taken", &taken)?;
        }
        _ => return Err(ctx.unknown_step()),
    }
    Ok(if taken.len() == signals { done(taken) } else { wait_for("tick").then("next") })
}

#[cfg(test)]
mod tests {
    use super::*;
    use steadfast::testkit::TestKit;
    use steadfast::{End, Signal};

    #[tokio::test]
    async fn samples_that_wait_take_their_signals() -> Result<(), steadfast::Error> {
        let mut kit = TestKit::new(all().into_iter().map(|(definition, _, _)| definition))?;
        let id = kit.start("tally", &serde_json::json!({"signals": 3})).await?;
        kit.step().await?;
        for n in 0..3 {
            kit.signal(&id, Signal::new("tick").payload(&n)).await?;
        }
        assert_eq!(kit.result::<Vec<u32>>(&id).await?, [0, 1, 2]);
        for (signal, answer) in [(Some("approve"), "approve"), (Some("reject"), "reject"), (None, "")] {
            let id = kit.start("approval", &serde_json::json!({"seconds": 60})).await?;
            if let Some(name) = signal {
                kit.signal(&id, Signal::new(name).payload("why")).await?;
            }
            let told: serde_json::Value = kit.result(&id).await?;
            assert_eq!(told["answer"].as_str().unwrap_or_default(), answer);
        }
        Ok(())
    }

    #[tokio::test]
    async fn samples_do_what_they_say() -> Result<(), steadfast::Error> {
        let mut kit = TestKit::new(all().into_iter().map(|(definition, _, _)| definition))?;
        for (name, input, expected) in [
            ("hello", serde_json::json!({"steps": 3}), Ok(r#""steps":3"#)),
            ("hello", serde_json::json!({}), Ok(r#""steps":3"#)),
            ("hello", serde_json::json!(null), Ok(r#""steps":3"#)),
            ("hello", serde_json::json!({"steps": 0}), Err("invalid_input")),
            ("hello", serde_json::json!("x"), Err("invalid_input")),
            ("flaky", serde_json::json!({"failures": 3}), Ok(r#""attempts":4"#)),
            ("flaky", serde_json::json!({"failures": 101}), Err("invalid_input")),
            ("sleeper", serde_json::json!({"seconds": 86400, "times": 2}), Ok(r#""slept":2"#)),
            ("sleeper", serde_json::json!({"seconds": -1}), Err("invalid_input")),
            ("flight", serde_json::json!({"row": 1}), Ok(r#""carrier":"UA""#)),
            ("flight", serde_json::json!({"row": 0}), Err("no_such_row")),
        ] {
            let id = kit.start(name, &input).await?;
            match (kit.end(&id).await?, expected) {
                (End::Completed(result), Ok(part)) => assert!(result.as_str().contains(part), "{name}: {result}"),
                (End::Failed { code, .. }, Err(expected)) => assert_eq!(code, expected, "{name} {input}"),
                (end, expected) => panic!("{name} {input}: {end:?}, expected {expected:?}"),
            }
        }
        kit.verify()
    }
}
