//! The importing process: hands over rows, runs their workflows, says how far it is.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use steadfast::{Ctx, Definition, Engine, Failure, Limits, Request, StepResult, done, step};

use super::flights::{self, Enriched, Flight, Reference};
use super::proof::Database;
use crate::place::At;

/// Rows handed over in one bulk start.
const SLICE: usize = 512;
/// How many workflows run at once: enough that every commit carries a full batch.
const CONCURRENCY: usize = 512;

/// `demo-import`: the demo's child process.
#[derive(Debug, Args)]
pub struct Import {
    /// The store; not on the command line, which everybody on the machine can read.
    #[arg(long, env = "STEADFAST_STORE", hide_env_values = true)]
    store: String,
    /// How many rows there are in all.
    #[arg(long)]
    rows: u32,
    /// How many processes share them.
    #[arg(long)]
    nodes: u32,
    /// Which of those this is, counted from 0: it hands over every row of that remainder.
    #[arg(long)]
    node: u32,
    /// How many of its own were acknowledged before.
    #[arg(long)]
    from: u32,
    /// How often the process will be killed in all.
    #[arg(long)]
    kills: u32,
    /// Serve the HTTP API here meanwhile.
    #[arg(long)]
    listen: Option<SocketAddr>,
}

/// One line of the child's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Progress {
    /// Rows whose start was answered.
    pub(super) acknowledged: u32,
    /// Rows whose workflow has ended.
    pub(super) finished: u32,
}

impl Progress {
    pub(super) fn read(line: &str) -> Option<Self> {
        let mut words = line.strip_prefix("progress ")?.split(' ');
        let (acknowledged, finished) = (words.next()?.parse().ok()?, words.next()?.parse().ok()?);
        // A whole line ends in a full stop; one that a kill cut short does not.
        (words.next() == Some(".")).then_some(Self { acknowledged, finished })
    }
}

/// What a flight's workflow is started with.
#[derive(Debug, Serialize, Deserialize)]
struct Input {
    /// The row's number in the source.
    row: u32,
    /// The row itself; looked up by its number when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    line: Option<String>,
}

/// The definition that imports one flight: parse and validate, enrich, record.
pub fn flight_definition() -> Definition {
    let reference: Arc<OnceLock<Reference>> = Arc::default();
    Definition::new("flight", move |ctx| flight(ctx, reference.clone())).steps(["start", "enrich", "record"])
}

async fn flight(ctx: Ctx, reference: Arc<OnceLock<Reference>>) -> StepResult {
    match ctx.step() {
        "start" => {
            let input: Input = crate::samples::input(&ctx, r#"{"row": 1}"#).await?;
            let line = match input.line {
                Some(line) => line,
                None => flights::row(input.row).ok_or_else(|| {
                    Failure::terminal("no_such_row", format!("give a row from 1 to {}", flights::ROWS))
                })?,
            };
            let flight = flights::parse(&line).map_err(|invalid| {
                Failure::terminal(invalid.code, format!("{}: {}", invalid.field, invalid.message))
            })?;
            ctx.set("flight", &flight)?;
            Ok(step("enrich"))
        }
        "enrich" => {
            let flight: Flight = ctx.get("flight").await?.ok_or_else(|| missing("flight"))?;
            let enriched = flights::enrich(&flight, reference.get_or_init(Reference::load));
            ctx.set("enriched", &enriched)?;
            Ok(step("record"))
        }
        "record" => {
            let enriched: Enriched = ctx.get("enriched").await?.ok_or_else(|| missing("enriched"))?;
            Ok(done(flights::record(&enriched)))
        }
        _ => Err(ctx.unknown_step()),
    }
}

fn missing(key: &str) -> Failure {
    Failure::terminal("missing_variable", format!("the step before has not set {key}"))
}

/// The id of a row's workflow: the same in every process, so that a row handed over twice is accepted once.
pub(super) fn id(row: u32) -> String {
    format!("flight-{row:06}")
}

/// Runs the import to its end.
///
/// # Errors
/// Whatever the engine says.
pub async fn import(args: Import) -> Result<(), super::Failure> {
    let at = At::read(&args.store)?;
    let builder = Engine::open(&args.store)?;
    // Before the engine runs anything: what it ends is not counted twice.
    let finished = tokio::task::spawn_blocking(move || Finished::open(&at)).await??;
    let engine = builder
        .define(flight_definition())
        .concurrency(CONCURRENCY)
        // A kill costs a delivery of each running step, and no row shall fail of our kills.
        .limits(Limits {
            deliveries_max: Limits::default().deliveries_max.saturating_add(args.kills),
            ..Limits::default()
        })
        .run()?;
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let server = match args.listen {
        Some(listen) => {
            let options = steadfast_server::Options { listen, ..steadfast_server::Options::default() };
            let server = steadfast_server::Server::bind(engine.clone(), options).await?;
            Some(tokio::spawn(server.run(async move {
                // The sender goes away with the import: that too is the end.
                let _ = stopped.await;
            })))
        }
        None => None,
    };
    let acknowledged = Arc::new(AtomicU32::new(args.from));
    // Says how far the import is, whatever it is doing; ends with the last row.
    let saying = tokio::spawn(say(engine.clone(), finished, acknowledged.clone(), args.rows));
    let own = move |n: &(u32, (u32, String))| n.0 % args.nodes == args.node;
    let mut rows = (0..).zip(flights::rows(args.rows)).filter(own).map(|(_, row)| row).skip(args.from as usize);
    loop {
        let slice: Vec<Request> = rows
            .by_ref()
            .take(SLICE)
            .map(|(row, line)| Request::new("flight").id(id(row)).input(&Input { row, line: Some(line) }))
            .collect();
        if slice.is_empty() {
            break;
        }
        for accepted in engine.start_many(slice).await? {
            accepted?;
            acknowledged.fetch_add(1, Ordering::Relaxed);
        }
    }
    saying.await??;
    // The server, if any, is told by this that the import is over.
    drop(stop);
    if let Some(server) = server {
        server.await?;
    }
    engine.shutdown(Duration::from_secs(10)).await;
    Ok(())
}

/// How many workflows of the store have ended, whoever ran them.
enum Finished {
    /// One process owns the store: what had ended when it came, and what has ended since.
    Alone(u32),
    /// The store is asked.
    Shared(Arc<Mutex<Database>>),
}

impl Finished {
    fn open(at: &At) -> Result<Self, super::Failure> {
        let database = Database::open(at)?;
        Ok(match at {
            At::File(_) => Self::Alone(database.finished()?),
            At::Postgres(_) => Self::Shared(Arc::new(Mutex::new(database))),
        })
    }

    /// The count, and how long to leave it alone then.
    async fn count(&self, engine: &Engine) -> Result<(u32, Duration), super::Failure> {
        match self {
            Self::Alone(before) => {
                Ok((before + u32::try_from(engine.ended()).unwrap_or(u32::MAX), Duration::from_millis(2)))
            }
            Self::Shared(database) => {
                let (database, begin) = (database.clone(), Instant::now());
                let count = tokio::task::spawn_blocking(move || {
                    database.lock().unwrap_or_else(PoisonError::into_inner).finished()
                })
                .await??;
                // It reads every head: a twentieth of the time may go into that.
                Ok((count, (begin.elapsed() * 20).clamp(Duration::from_millis(20), Duration::from_secs(2))))
            }
        }
    }
}

/// Says how far the import is until it has come to its end.
async fn say(
    engine: Engine,
    finished: Finished,
    acknowledged: Arc<AtomicU32>,
    rows: u32,
) -> Result<(), super::Failure> {
    let mut last = None;
    loop {
        let (finished, rest) = finished.count(&engine).await?;
        let progress = Progress { acknowledged: acknowledged.load(Ordering::Relaxed), finished };
        if last != Some(progress) {
            println!("progress {} {finished} .", progress.acknowledged);
            last = Some(progress);
        }
        if finished >= rows {
            return Ok(());
        }
        tokio::time::sleep(rest).await;
    }
}

#[cfg(test)]
mod tests {
    use super::Progress;

    #[test]
    fn a_line_that_a_kill_cut_short_says_nothing() {
        let whole = Progress::read("progress 12 7 .");
        assert_eq!(whole, Some(Progress { acknowledged: 12, finished: 7 }));
        for cut in ["progress 12 7", "progress 12", "progress 1", "prog", "", "progress 12 7 . ."] {
            assert!(Progress::read(cut).is_none() || cut.ends_with(". ."), "{cut}");
        }
    }
}
