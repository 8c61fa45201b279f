//! `steadfast demo`: real flights, imported by durable workflows, in a process that is killed on the way.
//!
//! The parent plays the caller and the fate: it starts the importer as a child process, remembers how many rows the
//! child acknowledged, kills the child with SIGKILL at random moments and starts it again. At the end it opens the
//! store by itself and proves from the logs that nothing acknowledged was lost and nothing was done twice.

pub mod flights;
mod importer;
mod proof;
pub mod summary;

use std::fs;
use std::io::{BufRead, BufReader, IsTerminal};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

pub use importer::{Import, flight_definition, import};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Rows to import, spread evenly over the year.
    #[arg(long, value_name = "N", default_value_t = 10_000, conflicts_with = "all", value_parser = clap::value_parser!(u32).range(1..=i64::from(flights::ROWS)))]
    rows: u32,
    /// Import every flight of the year: 336,776 rows.
    #[arg(long)]
    all: bool,
    /// How often the importing process is killed on the way.
    #[arg(long, value_name = "N", default_value_t = 3)]
    kills: u32,
    /// Folder for the store and the result, new or empty; by default a new one below ./steadfast-data.
    #[arg(long, value_name = "DIR", conflicts_with = "store")]
    data: Option<PathBuf>,
    /// A store that does not exist yet, as sqlite:PATH; the result goes beside it.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Serve the HTTP API of the importing process at this address meanwhile.
    #[arg(long, value_name = "ADDR", value_parser = crate::serve::address)]
    listen: Option<SocketAddr>,
    /// One JSON object on standard output.
    #[arg(long)]
    json: bool,
}

impl Demo {
    pub(crate) fn wants_json(&self) -> bool {
        self.json
    }
}

/// What the demo did, as `--json` prints it.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Rows handed over.
    rows: u64,
    /// Workflows in the store.
    workflows: u64,
    /// Those that completed.
    completed: u64,
    /// Those that ended failed, with a code: rows that are not valid.
    failed: u64,
    /// Acknowledged rows that are not in the store, or not finished.
    lost: u64,
    /// Rows or steps that were committed more than once.
    doubled: u64,
    /// How often the process was killed.
    kills: u32,
    /// Steps that ran when their process was killed, and ran again.
    redelivered: u64,
    /// What `verify` found.
    faults: u64,
    /// From the first start of the importer to its last end, in seconds.
    seconds: f64,
    /// Steps committed per second over that time.
    steps_per_s: f64,
    /// Bytes of the store.
    store_bytes: u64,
    /// The store's file.
    store: PathBuf,
    /// The result as CSV.
    output: PathBuf,
}

/// Runs the demo.
///
/// # Errors
/// When the folder is not empty, the child does not start, or the proof does not hold.
pub async fn run(demo: Demo) -> Result<(), Failure> {
    tokio::task::spawn_blocking(move || run_blocking(&demo)).await?
}

fn run_blocking(demo: &Demo) -> Result<(), Failure> {
    if let Some(listen) = demo.listen {
        steadfast_server::may_listen(listen)?;
    }
    let (store, output) = place(demo)?;
    let rows = if demo.all { flights::ROWS } else { demo.rows };
    let say = |line: &str| {
        if !demo.json {
            println!("{line}");
        }
    };
    say(&format!("importing {rows} flights as durable workflows into {}", store.display()));
    let begin = Instant::now();
    let kills = drive(demo, &store, rows)?;
    let seconds = begin.elapsed().as_secs_f64();
    say("the importer is done; now the proof, from the store alone");
    let bar = bar(demo, u64::from(rows), "verifying");
    let proof = proof::prove(&store, rows, |done| bar.set_position(done))?;
    bar.finish_and_clear();
    let summary = proof::write_result(&store, &output)?;
    let report = Report {
        rows: u64::from(rows),
        workflows: proof.workflows,
        completed: proof.completed,
        failed: proof.failed,
        lost: proof.lost,
        doubled: proof.doubled,
        kills,
        redelivered: proof.redelivered,
        faults: proof.faults,
        seconds,
        steps_per_s: proof.steps as f64 / seconds,
        store_bytes: fs::metadata(&store)?.len(),
        store,
        output,
    };
    if demo.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("\n{summary}");
        tell(&report, &proof);
    }
    if proof.holds() { Ok(()) } else { Err("the proof does not hold; the store is kept for looking into".into()) }
}

fn tell(report: &Report, proof: &proof::Proof) {
    let Report { rows, workflows, completed, failed, kills, redelivered, seconds, steps_per_s, .. } = report;
    println!("proof, read from the logs in the store:");
    println!("  {rows} rows handed over, {workflows} workflows: {completed} completed, {failed} failed as not valid");
    println!(
        "  every step was started as often as it was committed, failed or given back: {}",
        yes(proof.unexplained == 0)
    );
    println!(
        "  lost {}   doubled {}   verify: {} faults in {} events",
        report.lost, report.doubled, report.faults, proof.events
    );
    println!("  killed {kills} times; {redelivered} steps were running then and were given back at once");
    println!(
        "  {} steps in {seconds:.1} s ({steps_per_s:.0} a second, restarts included), store {:.1} MB",
        proof.steps,
        report.store_bytes as f64 / 1e6
    );
    println!("\nresult  {}", report.output.display());
    println!("store   {}", report.store.display());
    println!("        steadfast verify --store sqlite:{}", report.store.display());
}

fn yes(holds: bool) -> &'static str {
    if holds { "yes" } else { "NO" }
}

/// Where the store and the result go; refuses what is not empty.
fn place(demo: &Demo) -> Result<(PathBuf, PathBuf), Failure> {
    if let Some(url) = &demo.store {
        let path = url.strip_prefix("sqlite:").ok_or("--store takes sqlite:PATH")?;
        let path = PathBuf::from(path.strip_prefix("//").unwrap_or(path));
        if path.exists() {
            return Err(format!("{} exists; the demo needs a fresh store, give another path", path.display()).into());
        }
        if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            fs::create_dir_all(folder)?;
        }
        let output = path.with_extension("csv");
        return Ok((path, output));
    }
    let folder = match &demo.data {
        Some(folder) => {
            if folder.exists() && fs::read_dir(folder)?.next().is_some() {
                return Err(format!("{} is not empty; give a new or empty folder", folder.display()).into());
            }
            folder.clone()
        }
        None => {
            let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
            let base = Path::new("steadfast-data");
            let name =
                |n: u32| base.join(if n == 0 { format!("demo-{seconds}") } else { format!("demo-{seconds}-{n}") });
            (0..).map(name).find(|folder| !folder.exists()).ok_or("no free folder name")?
        }
    };
    fs::create_dir_all(&folder)?;
    Ok((folder.join("flights.db"), folder.join("flights.csv")))
}

/// The importer as a child process. It does not outlive this value.
struct Importer {
    child: Child,
}

impl Importer {
    fn spawn(demo: &Demo, store: &Path, rows: u32, from: u32) -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("demo-import").arg("--store").arg(store);
        command.arg("--rows").arg(rows.to_string()).arg("--from").arg(from.to_string());
        command.arg("--kills").arg(demo.kills.to_string());
        if let Some(listen) = demo.listen {
            command.arg("--listen").arg(listen.to_string());
        }
        let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        Ok(Self { child })
    }
}

impl Drop for Importer {
    fn drop(&mut self) {
        // Already gone, or about to be: nothing is left behind either way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the importer to its end, killing it on the way; answers how often it was killed.
fn drive(demo: &Demo, store: &Path, rows: u32) -> Result<u32, Failure> {
    let mut moments = kill_moments(demo.kills, rows)?;
    let bar = bar(demo, u64::from(rows), "importing");
    let (mut acknowledged, mut kills, mut stalled) = (0, 0, 0);
    loop {
        let before = acknowledged;
        let mut importer = Importer::spawn(demo, store, rows, acknowledged)?;
        let output = importer.child.stdout.take().ok_or("the importer has no output")?;
        let mut killed = false;
        for line in BufReader::new(output).lines() {
            // The last line of a killed process may be cut short; it is then not a progress line.
            let Ok(line) = line else { break };
            let Some(progress) = importer::Progress::read(&line) else { continue };
            acknowledged = acknowledged.max(progress.acknowledged);
            bar.set_position(u64::from(progress.finished));
            if !killed && moments.last().is_some_and(|moment| progress.finished >= *moment) {
                moments.pop();
                // SIGKILL: no handler runs, nothing is flushed, no lock is let go of by us.
                importer.child.kill()?;
                killed = true;
                kills += 1;
                bar.set_message(format!("killed {kills}x"));
            }
        }
        let status = importer.child.wait()?;
        if !killed && status.success() {
            bar.finish_and_clear();
            return Ok(kills);
        }
        if !killed {
            // Not our doing: give it another chance as a supervisor would, but not for ever.
            stalled = if acknowledged > before { 0 } else { stalled + 1 };
            if stalled == 3 {
                return Err(format!("the importer ended by itself three times ({status})").into());
            }
        }
    }
}

/// At how many finished rows to kill, latest first: one random moment in each of so many equal parts of the way,
/// none in its last part, so that the process is still at work when the signal comes.
fn kill_moments(kills: u32, rows: u32) -> Result<Vec<u32>, Failure> {
    let part = f64::from(rows) * 0.85 / f64::from(kills.max(1));
    let mut moments = Vec::new();
    for n in (0..kills).rev() {
        let mut bytes = [0; 4];
        getrandom::fill(&mut bytes)?;
        let within = f64::from(u32::from_be_bytes(bytes)) / f64::from(u32::MAX);
        moments.push(((f64::from(n) + within) * part) as u32);
    }
    Ok(moments)
}

fn bar(demo: &Demo, length: u64, what: &'static str) -> ProgressBar {
    if demo.json || !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let style = ProgressStyle::with_template("{prefix:<10} [{bar:40}] {pos}/{len}  {per_sec}  {eta} left  {msg}");
    let bar = ProgressBar::new(length).with_prefix(what);
    bar.enable_steady_tick(Duration::from_millis(200));
    match style {
        Ok(style) => bar.with_style(style.progress_chars("=> ")),
        Err(_) => bar,
    }
}
