//! `steadfast bench drain`: a queue of one-step workflows, enqueued in bulk and then run to the end.

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use steadfast::store::postgres::is_postgres;
use steadfast::{Ctx, Engine, Request, StepResult, done};

use super::postgres::Scratch;

/// Starts in one bulk call.
const BULK: usize = 1_000;

/// `bench drain`.
#[derive(Debug, Args)]
pub struct Drain {
    /// A folder for a scratch file, or a PostgreSQL database for a scratch schema.
    #[arg(
        long,
        value_name = "DIR|URL",
        default_value = "./steadfast-data",
        env = "STEADFAST_STORE",
        hide_env_values = true
    )]
    store: String,
    /// How many workflows.
    #[arg(long, default_value = "20000")]
    workflows: NonZeroUsize,
    /// How many run at once.
    #[arg(long, default_value = "1024")]
    concurrency: NonZeroUsize,
    /// Runs; the median counts.
    #[arg(long, default_value = "3")]
    rounds: NonZeroUsize,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    enqueue_per_s: f64,
    drain_per_s: f64,
    workflows: usize,
    concurrency: usize,
    rounds: usize,
}

type Failure = Box<dyn std::error::Error>;

async fn noop(_: Ctx) -> StepResult {
    Ok(done(()))
}

fn node(url: &str, concurrency: usize) -> Result<Engine, steadfast::Error> {
    Engine::open(url)?.register("noop", noop).concurrency(concurrency).run()
}

pub(super) async fn run(args: Drain) -> Result<(), Failure> {
    let (mut enqueued, mut drained) = (Vec::new(), Vec::new());
    for round in 0..args.rounds.get() {
        let (into, out) = if is_postgres(&args.store) {
            let scratch = Scratch::new(&args.store, &format!("d{round}"))?;
            once(&args, &scratch.url).await?
        } else {
            let folder = std::path::Path::new(&args.store).join(format!("bench-{}-{round}", std::process::id()));
            std::fs::create_dir_all(&folder)?;
            let rates = once(&args, &format!("sqlite:{}", folder.join("drain.db").display())).await;
            std::fs::remove_dir_all(&folder)?;
            rates?
        };
        enqueued.push(into);
        drained.push(out);
    }
    let report = Report {
        enqueue_per_s: super::median(&mut enqueued),
        drain_per_s: super::median(&mut drained),
        workflows: args.workflows.get(),
        concurrency: args.concurrency.get(),
        rounds: args.rounds.get(),
    };
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!(
            "{} workflows of one step: enqueued at {:.0}/s in calls of {BULK}, drained at {:.0}/s, each with its full history",
            report.workflows, report.enqueue_per_s, report.drain_per_s
        );
    }
    Ok(())
}

/// Answers how many a second were enqueued, and how many a second were run to their end.
async fn once(args: &Drain, url: &str) -> Result<(f64, f64), Failure> {
    let count = args.workflows.get();
    // One that runs nothing, so that nothing is drained meanwhile.
    let front = node(url, 0)?;
    let begin = Instant::now();
    let calls = (0..count).step_by(BULK).map(|first| {
        let front = front.clone();
        let requests: Vec<Request> = (first..count.min(first + BULK)).map(|n| Request::new("noop").input(&n)).collect();
        async move {
            for accepted in front.start_many(requests).await? {
                accepted?;
            }
            Ok::<(), steadfast::Error>(())
        }
    });
    // Two callers, as a client has that fills one bulk while the other is answered.
    use futures_util::StreamExt;
    let mut calls = futures_util::stream::iter(calls).buffer_unordered(2);
    while let Some(call) = calls.next().await {
        call?;
    }
    drop(calls);
    let enqueued = count as f64 / begin.elapsed().as_secs_f64();
    front.shutdown(Duration::from_secs(5)).await;
    let begin = Instant::now();
    let engine = node(url, args.concurrency.get())?;
    while engine.ended() < count as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let drained = count as f64 / begin.elapsed().as_secs_f64();
    engine.shutdown(Duration::from_secs(5)).await;
    Ok((enqueued, drained))
}
