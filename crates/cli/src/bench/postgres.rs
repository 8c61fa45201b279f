//! `steadfast bench postgres`.

use std::num::NonZeroUsize;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use steadfast::store::postgres::{self, Place, limit};

use super::{RESULT, STEPS, alone, median, open, percentile, step_texts, ten_steps};

/// `bench postgres`.
#[derive(Debug, Args)]
pub struct Postgres {
    /// The database: postgres://USER:PASSWORD@HOST/DATABASE. Schemas of its own are made in it and dropped again. What else
    /// the URL says is measured with: ?committers=4 for four connections of each node that write.
    #[arg(long, value_name = "URL", env = "STEADFAST_STORE", hide_env_values = true)]
    store: String,
    /// Workflows of ten steps in each run.
    #[arg(long, default_value = "5000")]
    workflows: NonZeroUsize,
    /// Runs of each figure; the median counts.
    #[arg(long, default_value = "3")]
    rounds: NonZeroUsize,
    /// How many workflows are in flight together.
    #[arg(long, value_delimiter = ',', default_value = "64,1024")]
    in_flight: Vec<NonZeroUsize>,
    /// Nodes that share them.
    #[arg(long, value_delimiter = ',', default_value = "1,2")]
    nodes: Vec<NonZeroUsize>,
    /// Measure once more in a store that holds so many finished workflows already, beside an empty one.
    #[arg(long, value_name = "N", default_value = "0")]
    finished: u32,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

/// What finished workflows cost the others.
#[derive(Debug, Clone, Serialize)]
struct Finished {
    workflows: u32,
    in_flight: usize,
    steps_per_s: f64,
    empty_steps_per_s: f64,
    ratio: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Throughput {
    nodes: usize,
    in_flight: usize,
    steps_per_s: f64,
    limit_steps_per_s: f64,
    ratio: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Alone {
    bare_commit_p50_ms: f64,
    one_step_p50_ms: f64,
    one_step_p99_ms: f64,
    ten_steps_p50_ms: f64,
    ten_steps_p99_ms: f64,
}

#[derive(Debug, Clone, Serialize)]
struct Report {
    steps_per_s: f64,
    limit_steps_per_s: f64,
    ratio: f64,
    runs: Vec<Throughput>,
    bytes_per_step: f64,
    alone: Alone,
    finished: Option<Finished>,
    workflows: usize,
    steps: usize,
    rounds: usize,
    server: String,
    settings: String,
}

/// How long nodes take to know of each other.
const MEETING: Duration = Duration::from_secs(5);

type Failure = Box<dyn std::error::Error>;

/// A scratch schema that is dropped with this value.
pub(super) struct Scratch {
    pub(super) url: String,
}

impl Scratch {
    pub(super) fn new(store: &str, name: &str) -> Result<Self, Failure> {
        let schema = format!("steadfast_bench_{}_{name}", std::process::id());
        let joint = if store.contains('?') { '&' } else { '?' };
        let url = format!("{store}{joint}schema={schema}");
        Place::parse(&url)?;
        Ok(Self { url })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = postgres::drop_schema(&self.url) {
            eprintln!("a scratch schema is left behind: {error}");
        }
    }
}

pub(super) async fn run(args: Postgres) -> Result<(), Failure> {
    let report = measure(&args).await?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!(
        "{} workflows of {STEPS} steps, median of {} rounds, PostgreSQL {}, {}",
        report.workflows, report.rounds, report.server, report.settings
    );
    println!("{:>6} {:>10} {:>12} {:>16} {:>7}", "nodes", "in flight", "steps/s", "limit steps/s", "ratio");
    for run in &report.runs {
        println!(
            "{:>6} {:>10} {:>12.0} {:>16.0} {:>7.2}",
            run.nodes, run.in_flight, run.steps_per_s, run.limit_steps_per_s, run.ratio
        );
    }
    println!("{:.0} bytes of tables and indexes a step", report.bytes_per_step);
    let alone = &report.alone;
    println!("one at a time, a bare batch of one takes {:.2} ms (p50):", alone.bare_commit_p50_ms);
    println!("   1 step   p50 {:.2} ms, p99 {:.2} ms", alone.one_step_p50_ms, alone.one_step_p99_ms);
    println!("  10 steps  p50 {:.2} ms, p99 {:.2} ms", alone.ten_steps_p50_ms, alone.ten_steps_p99_ms);
    if let Some(Finished { workflows, in_flight, steps_per_s, empty_steps_per_s, ratio }) = &report.finished {
        println!(
            "beside {workflows} finished workflows, {in_flight} in flight: {steps_per_s:.0} steps/s, beside none \
             {empty_steps_per_s:.0}, ratio {ratio:.2}"
        );
    }
    Ok(())
}

async fn measure(args: &Postgres) -> Result<Report, Failure> {
    let (workflows, steps) = (args.workflows.get(), args.workflows.get() * STEPS);
    let cases: Vec<(usize, usize)> =
        args.nodes.iter().flat_map(|nodes| args.in_flight.iter().map(|n| (nodes.get(), n.get()))).collect();
    let mut engine_runs = vec![Vec::new(); cases.len()];
    let mut limit_runs = vec![Vec::new(); args.in_flight.len()];
    let (mut bytes, mut bare, mut one, mut ten) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (server, settings) = postgres::describe(&args.store)?;
    // Interleaved, so that a slow minute of the machine meets every figure alike.
    for round in 0..args.rounds.get() {
        for (i, in_flight) in args.in_flight.iter().enumerate() {
            // As many rows in a batch, and as many connections, as the engine has at most.
            let batch = (in_flight.get() / 2).clamp(1, 512);
            limit_runs[i].push(bare_loop(args, &format!("l{round}_{i}"), steps, batch, 2).await?.steps_per_s);
        }
        for (i, (nodes, in_flight)) in cases.iter().copied().enumerate() {
            let scratch = Scratch::new(&args.store, &format!("e{round}_{i}"))?;
            let engines: Vec<_> =
                (0..nodes).map(|_| open(&scratch.url, in_flight.div_ceil(nodes))).collect::<Result<_, _>>()?;
            if nodes > 1 {
                // As in a store that has had them for a while: each has seen the others when it renewed its lease.
                tokio::time::sleep(MEETING).await;
            }
            let took = ten_steps(&engines, workflows, in_flight).await?;
            if let Some(engine) = engines.first() {
                bytes.push(engine.look(|reader| reader.bytes()).await? as f64 / steps as f64);
            }
            for engine in engines {
                engine.shutdown(Duration::from_secs(5)).await;
            }
            engine_runs[i].push(steps as f64 / took);
        }
        bare.extend(bare_loop(args, &format!("b{round}"), 500, 1, 1).await?.commits);
        let scratch = Scratch::new(&args.store, &format!("a{round}"))?;
        let (ones, tens) = alone(&scratch.url, 100).await?;
        one.extend(ones);
        ten.extend(tens);
    }
    let finished = if args.finished == 0 { None } else { Some(beside_finished(args).await?) };
    let limits: Vec<f64> = limit_runs.iter_mut().map(|runs| median(runs)).collect();
    let runs: Vec<Throughput> = cases
        .iter()
        .enumerate()
        .map(|(i, (nodes, in_flight))| {
            let (steps_per_s, limit_steps_per_s) = (median(&mut engine_runs[i]), limits[i % limits.len()]);
            let ratio = steps_per_s / limit_steps_per_s;
            Throughput { nodes: *nodes, in_flight: *in_flight, steps_per_s, limit_steps_per_s, ratio }
        })
        .collect();
    let first = runs.first().ok_or("give at least one number for --in-flight and --nodes")?;
    Ok(Report {
        steps_per_s: first.steps_per_s,
        limit_steps_per_s: first.limit_steps_per_s,
        ratio: first.ratio,
        bytes_per_step: median(&mut bytes),
        finished,
        alone: Alone {
            bare_commit_p50_ms: percentile(&mut bare, 50),
            one_step_p50_ms: percentile(&mut one, 50),
            one_step_p99_ms: percentile(&mut one, 99),
            ten_steps_p50_ms: percentile(&mut ten, 50),
            ten_steps_p99_ms: percentile(&mut ten, 99),
        },
        runs,
        workflows,
        steps,
        rounds: args.rounds.get(),
        server,
        settings,
    })
}

/// The bare loop with the very texts that the engine writes.
async fn bare_loop(
    args: &Postgres,
    name: &str,
    steps: usize,
    batch: usize,
    connections: usize,
) -> Result<limit::Limit, Failure> {
    let scratch = Scratch::new(&args.store, name)?;
    let url = scratch.url.clone();
    let (completed, started) = step_texts();
    let measured = tokio::task::spawn_blocking(move || {
        let texts = limit::Texts { completed: &completed, started: &started, value: RESULT };
        limit::measure(&url, steps, batch, connections, texts)
    });
    Ok(measured.await??)
}

/// Runs beside finished workflows and beside none, by turns.
async fn beside_finished(args: &Postgres) -> Result<Finished, Failure> {
    let in_flight = args.in_flight.first().map_or(64, |n| n.get());
    let workflows = args.workflows.get();
    let full = Scratch::new(&args.store, "full")?;
    let (url, count) = (full.url.clone(), args.finished);
    tokio::task::spawn_blocking(move || postgres::fill_with_finished(&url, count)).await??;
    let (mut beside, mut empty) = (Vec::new(), Vec::new());
    for round in 0..args.rounds.get() {
        let none = Scratch::new(&args.store, &format!("n{round}"))?;
        for (url, into) in [(&full.url, &mut beside), (&none.url, &mut empty)] {
            let engine = open(url, in_flight)?;
            let took = ten_steps(std::slice::from_ref(&engine), workflows, in_flight).await?;
            engine.shutdown(Duration::from_secs(5)).await;
            into.push((workflows * STEPS) as f64 / took);
        }
    }
    let (steps_per_s, empty_steps_per_s) = (median(&mut beside), median(&mut empty));
    let ratio = steps_per_s / empty_steps_per_s;
    Ok(Finished { workflows: args.finished, in_flight, steps_per_s, empty_steps_per_s, ratio })
}
