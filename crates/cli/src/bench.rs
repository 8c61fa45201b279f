//! `steadfast bench`: how fast this machine runs the engine, beside what its database can do at most.

mod drain;
mod history;
mod postgres;

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::Serialize;
use steadfast::core::event::{Event, Next, TokenDigest, Writes};
use steadfast::core::text::{Key, Step};
use steadfast::store::sqlite::limit;
use steadfast::{Ctx, Engine, Json, Request, StepResult, done, step};

/// What to measure.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// Workflows of ten steps in this process on SQLite, beside the bare SQLite limit of the same run.
    Embedded(Embedded),
    /// One very long workflow beside a fresh one, and a store full of finished and sleeping workflows beside an empty one.
    History(history::History),
    /// A queue of one-step workflows, enqueued in bulk and then run to the end.
    Drain(drain::Drain),
    /// The same workflows on PostgreSQL, with one node and with two, beside a bare loop of the same statements. How many
    /// connections of a node write is said in the URL, as in ?committers=4.
    Postgres(postgres::Postgres),
}

impl Bench {
    pub(crate) fn wants_json(&self) -> bool {
        match self {
            Self::Embedded(args) => args.json,
            Self::History(args) => args.json,
            Self::Postgres(args) => args.json,
            Self::Drain(args) => args.json,
        }
    }
}

/// `bench embedded`.
#[derive(Debug, Args)]
pub struct Embedded {
    /// Where the scratch stores go; on the disk that is to be measured.
    #[arg(long, value_name = "DIR", default_value = "./steadfast-data")]
    data: PathBuf,
    /// Workflows of ten steps in each run.
    #[arg(long, default_value = "5000")]
    workflows: NonZeroUsize,
    /// Runs of each figure; the median counts.
    #[arg(long, default_value = "3")]
    rounds: NonZeroUsize,
    /// How many workflows are in flight together.
    #[arg(long, value_delimiter = ',', default_value = "64,256,1024")]
    in_flight: Vec<NonZeroUsize>,
    /// One JSON object on standard output.
    #[arg(long)]
    json: bool,
}

/// One figure at one number of workflows in flight.
#[derive(Debug, Clone, Serialize)]
struct Throughput {
    in_flight: usize,
    steps_per_s: f64,
    limit_steps_per_s: f64,
    ratio: f64,
    bytes_per_step: f64,
}

/// One workflow at a time.
#[derive(Debug, Clone, Serialize)]
struct Alone {
    bare_commit_p50_ms: f64,
    one_step_p50_ms: f64,
    one_step_p99_ms: f64,
    one_step_ratio: f64,
    ten_steps_p50_ms: f64,
    ten_steps_p99_ms: f64,
    ten_steps_ratio: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Report {
    steps_per_s: f64,
    limit_steps_per_s: f64,
    ratio: f64,
    in_flight: Vec<Throughput>,
    alone: Alone,
    workflows: usize,
    steps: usize,
    rounds: usize,
    sqlite: &'static str,
    durability: &'static str,
}

const STEPS: usize = 10;
/// A result of about 100 bytes, as the peers' runs have.
const RESULT: &str =
    r#"{"ok":true,"note":"a result of about one hundred bytes, as the comparison runs of the peers have"}"#;

/// Runs a benchmark.
///
/// # Errors
/// Whatever the engine or the disk says.
pub async fn run(bench: Bench) -> Result<(), Box<dyn std::error::Error>> {
    match bench {
        Bench::Embedded(args) => embedded(args).await,
        Bench::History(args) => history::run(args).await,
        Bench::Postgres(args) => postgres::run(args).await,
        Bench::Drain(args) => drain::run(args).await,
    }
}

async fn embedded(args: Embedded) -> Result<(), Box<dyn std::error::Error>> {
    let folder = args.data.join(format!("bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let measured = measure(&args, &folder).await;
    std::fs::remove_dir_all(&folder)?;
    let report = measured?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!(
        "{} workflows of {STEPS} steps, median of {} rounds, SQLite {}, {}",
        report.workflows, report.rounds, report.sqlite, report.durability
    );
    println!("{:>10} {:>12} {:>16} {:>7} {:>11}", "in flight", "steps/s", "limit steps/s", "ratio", "bytes/step");
    for row in &report.in_flight {
        println!(
            "{:>10} {:>12.0} {:>16.0} {:>7.2} {:>11.0}",
            row.in_flight, row.steps_per_s, row.limit_steps_per_s, row.ratio, row.bytes_per_step
        );
    }
    let alone = &report.alone;
    println!("one at a time, in bare commits of {:.3} ms (p50):", alone.bare_commit_p50_ms);
    println!(
        "   1 step   p50 {:.3} ms = {:.1} commits, p99 {:.3} ms",
        alone.one_step_p50_ms, alone.one_step_ratio, alone.one_step_p99_ms
    );
    println!(
        "  10 steps  p50 {:.3} ms = {:.1} commits, p99 {:.3} ms",
        alone.ten_steps_p50_ms, alone.ten_steps_ratio, alone.ten_steps_p99_ms
    );
    Ok(())
}

async fn measure(args: &Embedded, folder: &Path) -> Result<Report, Box<dyn std::error::Error>> {
    let steps = args.workflows.get() * STEPS;
    let mut engine_runs = vec![Vec::new(); args.in_flight.len()];
    let mut limit_runs = vec![Vec::new(); args.in_flight.len()];
    let mut bytes = vec![0.0; args.in_flight.len()];
    let (mut bare, mut one, mut ten) = (Vec::new(), Vec::new(), Vec::new());
    // Interleaved, so that a slow minute of the machine meets every figure alike.
    for round in 0..args.rounds.get() {
        for (i, in_flight) in args.in_flight.iter().map(|n| n.get()).enumerate() {
            let path = folder.join(format!("limit-{round}-{in_flight}.db"));
            let batch = in_flight;
            limit_runs[i].push(bare_limit(path, steps, batch.min(64)).await?.steps_per_s);
            let path = folder.join(format!("engine-{round}-{in_flight}.db"));
            let (steps_per_s, size) = throughput(&path, args.workflows.get(), in_flight).await?;
            engine_runs[i].push(steps_per_s);
            bytes[i] = size as f64 / steps as f64;
        }
        let path = folder.join(format!("bare-{round}.db"));
        bare.extend(bare_limit(path, 1_000, 1).await?.commits);
        let path = folder.join(format!("alone-{round}.db"));
        let (ones, tens) = alone(&format!("sqlite:{}", path.display()), 300).await?;
        one.extend(ones);
        ten.extend(tens);
    }
    let in_flight: Vec<Throughput> = args
        .in_flight
        .iter()
        .map(|n| n.get())
        .enumerate()
        .map(|(i, in_flight)| {
            let (steps_per_s, limit_steps_per_s) = (median(&mut engine_runs[i]), median(&mut limit_runs[i]));
            let ratio = steps_per_s / limit_steps_per_s;
            Throughput { in_flight, steps_per_s, limit_steps_per_s, ratio, bytes_per_step: bytes[i] }
        })
        .collect();
    let bare_commit_p50_ms = percentile(&mut bare, 50);
    let (one_step_p50_ms, one_step_p99_ms) = (percentile(&mut one, 50), percentile(&mut one, 99));
    let (ten_steps_p50_ms, ten_steps_p99_ms) = (percentile(&mut ten, 50), percentile(&mut ten, 99));
    let first = in_flight.first().ok_or("give at least one number for --in-flight")?;
    Ok(Report {
        steps_per_s: first.steps_per_s,
        limit_steps_per_s: first.limit_steps_per_s,
        ratio: first.ratio,
        alone: Alone {
            bare_commit_p50_ms,
            one_step_p50_ms,
            one_step_p99_ms,
            one_step_ratio: one_step_p50_ms / bare_commit_p50_ms,
            ten_steps_p50_ms,
            ten_steps_p99_ms,
            ten_steps_ratio: ten_steps_p50_ms / bare_commit_p50_ms,
        },
        in_flight,
        workflows: args.workflows.get(),
        steps,
        rounds: args.rounds.get(),
        sqlite: steadfast::store::sqlite::version(),
        durability: "WAL, answered after its sync (the limit: synchronous=FULL)",
    })
}

/// The texts of a step as the engine writes them: what ends it, and what begins the next.
fn step_texts() -> (String, String) {
    let writes: Writes = [(Key::trusted("result"), Some(Json::trusted(RESULT)))].into_iter().collect();
    let next = Some(Next::Step { step: Step::trusted("step"), run_at: None });
    let completed = Event::StepCompleted { step: Step::trusted("step"), attempt: 1, writes, next }.payload();
    let started = Event::StepStarted {
        step: Step::trusted("step"),
        visit: 5,
        attempt: 1,
        delivery: 1,
        worker: "n1.b1.p12345".to_owned(),
        epoch: 1,
        token_digest: TokenDigest([0xab; 16]),
    }
    .payload();
    (completed, started)
}

/// The bare loop with the very texts that the engine writes.
async fn bare_limit(path: PathBuf, steps: usize, batch: usize) -> Result<limit::Limit, Box<dyn std::error::Error>> {
    let (completed, started) = step_texts();
    tokio::task::spawn_blocking(move || limit::measure(&path, steps, batch, (&completed, &started, RESULT)))
        .await?
        .map_err(Into::into)
}

async fn stepper(ctx: Ctx, last: usize) -> StepResult {
    let made: usize = match ctx.step() {
        "start" => 1,
        other => other.parse().map_err(|_| ctx.unknown_step())?,
    };
    ctx.set_json("result", Json::trusted(RESULT))?;
    if made >= last { Ok(done(made)) } else { Ok(step((made + 1).to_string())) }
}

fn open(url: &str, concurrency: usize) -> Result<Engine, steadfast::Error> {
    Engine::open(url)?
        .register("ten", |ctx: Ctx| stepper(ctx, STEPS))
        .register("one", |ctx: Ctx| stepper(ctx, 1))
        .concurrency(concurrency)
        .run()
}

/// Ten-step workflows, so many in flight: each ended one is replaced by the next.
async fn throughput(path: &Path, workflows: usize, in_flight: usize) -> Result<(f64, u64), Box<dyn std::error::Error>> {
    let engine = open(&format!("sqlite:{}", path.display()), in_flight)?;
    let took = ten_steps(std::slice::from_ref(&engine), workflows, in_flight).await?;
    engine.shutdown(Duration::from_secs(5)).await;
    let bytes = std::fs::metadata(path)?.len();
    Ok(((workflows * STEPS) as f64 / took, bytes))
}

/// Runs so many workflows of ten steps, so many in flight over all nodes; answers the seconds it took.
async fn ten_steps(nodes: &[Engine], workflows: usize, in_flight: usize) -> Result<f64, Box<dyn std::error::Error>> {
    let left = Arc::new(AtomicU64::new(workflows as u64));
    let begin = Instant::now();
    let clients: Vec<_> = (0..in_flight)
        .map(|n| {
            let (engine, left) = (nodes[n % nodes.len()].clone(), left.clone());
            tokio::spawn(async move {
                while left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
                    let accepted = engine.start_request(Request::new("ten").input(&0)).await?;
                    engine.handle(accepted.id.as_str()).end().await?;
                }
                Ok::<(), steadfast::Error>(())
            })
        })
        .collect();
    for client in clients {
        client.await??;
    }
    Ok(begin.elapsed().as_secs_f64())
}

/// One workflow at a time: the time from the start to its end, for one step and for ten.
async fn alone(url: &str, n: usize) -> Result<(Vec<Duration>, Vec<Duration>), Box<dyn std::error::Error>> {
    let engine = open(url, 8)?;
    let mut times = (Vec::new(), Vec::new());
    for _ in 0..n {
        for (name, into) in [("one", &mut times.0), ("ten", &mut times.1)] {
            let begin = Instant::now();
            let accepted = engine.start_request(Request::new(name).input(&0)).await?;
            engine.handle(accepted.id.as_str()).end().await?;
            into.push(begin.elapsed());
        }
    }
    engine.shutdown(Duration::from_secs(5)).await;
    Ok(times)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

fn percentile(times: &mut [Duration], percent: usize) -> f64 {
    times.sort_unstable();
    let index = (times.len() * percent / 100).min(times.len().saturating_sub(1));
    times.get(index).map_or(f64::NAN, |time| time.as_secs_f64() * 1_000.0)
}
