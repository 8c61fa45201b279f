//! The importing process: hands over rows, runs their workflows, says how far it is.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use steadfast::{Ctx, Definition, Engine, Failure, Limits, Request, StepResult, done, step};

use super::flights::{self, Enriched, Flight, Reference};

/// Rows handed over in one bulk start.
const SLICE: usize = 512;
/// How many workflows run at once: enough that every commit carries a full batch.
const CONCURRENCY: usize = 512;

/// `demo-import`: the demo's child process.
#[derive(Debug, Args)]
pub struct Import {
    /// The store's file.
    #[arg(long)]
    store: PathBuf,
    /// How many rows there are in all.
    #[arg(long)]
    rows: u32,
    /// How many of them were acknowledged before.
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
    let engine = Engine::open(&format!("sqlite:{}", args.store.display()))?
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
    let store = args.store.clone();
    let finished_before = tokio::task::spawn_blocking(move || super::proof::finished(&store)).await??;
    let acknowledged = Arc::new(AtomicU32::new(args.from));
    let (watched, watched_acknowledged) = (engine.clone(), acknowledged.clone());
    // Says how far the import is, whatever it is doing; ends with the last row.
    let saying = tokio::spawn(async move {
        let mut last = None;
        loop {
            let finished = finished_before + u32::try_from(watched.ended()).unwrap_or(u32::MAX);
            let progress = Progress { acknowledged: watched_acknowledged.load(Ordering::Relaxed), finished };
            if last != Some(progress) {
                println!("progress {} {finished} .", progress.acknowledged);
                last = Some(progress);
            }
            if finished >= args.rows {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    });
    let mut rows = flights::rows(args.rows).skip(args.from as usize);
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
    saying.await?;
    // The server, if any, is told by this that the import is over.
    drop(stop);
    if let Some(server) = server {
        server.await?;
    }
    engine.shutdown(Duration::from_secs(10)).await;
    Ok(())
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
