//! `steadfast demo`: real flights, imported by durable workflows, in a process that is killed on the way.
//!
//! The parent plays the caller and the fate: it starts the importer as a child process, remembers how many rows the
//! child acknowledged, kills the child with SIGKILL at random moments and starts it again. At the end it opens the
//! store by itself and proves from the logs that nothing acknowledged was lost and nothing was done twice.
//!
//! On PostgreSQL two importers share the work, each hands over its own rows and runs whatever is ready, and the kills go
//! to one and the other in turns.

pub mod flights;
mod importer;
mod proof;
pub mod summary;

use std::fs;
use std::io::{BufRead, BufReader, IsTerminal};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

pub use importer::{Import, flight_definition, import};

use self::proof::Database;
use crate::exit::Exit;
use crate::place::{At, VARIABLE, from_environment};

type Failure = Box<dyn std::error::Error + Send + Sync>;

/// How many processes share the import on PostgreSQL.
const NODES: u32 = 2;

/// `demo`.
#[derive(Debug, Args)]
pub struct Demo {
    /// Rows to import, spread evenly over the year.
    #[arg(long, value_name = "N", default_value_t = 10_000, conflicts_with = "all", value_parser = clap::value_parser!(u32).range(1..=i64::from(flights::ROWS)))]
    rows: u32,
    /// Import every flight of the year: 336,776 rows.
    #[arg(long)]
    all: bool,
    /// How often an importing process is killed on the way.
    #[arg(long, value_name = "N", default_value_t = 3)]
    kills: u32,
    /// Folder for the store and the result, new or empty; by default a new one below ./steadfast-data.
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// A store without workflows: sqlite:PATH of a file that is not there, the result then goes beside it; or
    /// postgres://USER:PASSWORD@HOST/DATABASE?schema=NAME, which two processes share while they are killed in turns. Where
    /// neither this nor --data is given, the environment's STEADFAST_STORE stands for it.
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Serve the HTTP API of the (first) importing process at this address meanwhile.
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
    /// How many processes shared the import.
    nodes: u32,
    /// How often one of them was killed.
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
    /// The store: its file, or its URL without user and password.
    store: String,
    /// The result as CSV.
    output: PathBuf,
}

/// Runs the demo.
///
/// # Errors
/// When the store or the folder is not empty, a child does not start, or the proof does not hold.
pub async fn run(demo: Demo) -> Result<(), Exit> {
    tokio::task::spawn_blocking(move || run_blocking(&demo)).await.map_err(|error| Exit::other(error.to_string()))?
}

fn run_blocking(demo: &Demo) -> Result<(), Exit> {
    if let Some(listen) = demo.listen {
        steadfast_server::may_listen(listen).map_err(Failure::from)?;
    }
    let (at, output) = place(demo)?;
    run_at(demo, &at, output).map_err(Exit::from)
}

fn run_at(demo: &Demo, at: &At, output: PathBuf) -> Result<(), Failure> {
    let nodes = if matches!(at, At::Postgres(_)) { NODES } else { 1 };
    let rows = if demo.all { flights::ROWS } else { demo.rows };
    let say = |line: &str| {
        if !demo.json {
            println!("{line}");
        }
    };
    let with = if nodes == 1 { String::new() } else { format!(", with {nodes} processes") };
    say(&format!("importing {rows} flights as durable workflows into {}{with}", at.shown()));
    let begin = Instant::now();
    let kills = drive(demo, at, rows, nodes)?;
    let seconds = begin.elapsed().as_secs_f64();
    say("the importer is done; now the proof, from the store alone");
    let bar = bar(demo, u64::from(rows), "verifying");
    let proof = proof::prove(at, rows, |done| bar.set_position(done))?;
    bar.finish_and_clear();
    let summary = proof::write_result(at, &output)?;
    let report = Report {
        rows: u64::from(rows),
        workflows: proof.workflows,
        completed: proof.completed,
        failed: proof.failed,
        lost: proof.lost,
        doubled: proof.doubled,
        nodes,
        kills,
        redelivered: proof.redelivered,
        faults: proof.faults,
        seconds,
        steps_per_s: proof.steps as f64 / seconds,
        store_bytes: proof.bytes,
        store: at.shown(),
        output,
    };
    if demo.json {
        println!("{}", serde_json::to_string(&report)?);
    } else {
        println!("\n{summary}");
        tell(demo, &report, &proof, at);
    }
    if proof.holds() { Ok(()) } else { Err("the proof does not hold; the store is kept for looking into".into()) }
}

fn tell(demo: &Demo, report: &Report, proof: &proof::Proof, at: &At) {
    let Report { rows, workflows, completed, failed, kills, nodes, redelivered, seconds, steps_per_s, .. } = report;
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
    let whom = if *nodes == 1 { String::new() } else { format!(" of {nodes} processes") };
    println!("  killed {kills} times{whom}; {redelivered} steps were running then and were given back at once");
    println!(
        "  {} steps in {seconds:.1} s ({steps_per_s:.0} a second, restarts included), store {:.1} MB",
        proof.steps,
        report.store_bytes as f64 / 1e6
    );
    println!("\nresult  {}", report.output.display());
    println!("store   {}", report.store);
    match at {
        At::File(path) => println!("        steadfast verify --store sqlite:{}", path.display()),
        // What was given may hold a password, and is not said again.
        At::Postgres(_) if demo.store.is_some() => {
            println!("        steadfast verify --store URL, with the URL given here");
        }
        At::Postgres(_) => println!("        steadfast verify, with {VARIABLE} as it is"),
    }
}

fn yes(holds: bool) -> &'static str {
    if holds { "yes" } else { "NO" }
}

/// Where the store and the result go; refuses what is not empty.
fn place(demo: &Demo) -> Result<(At, PathBuf), Exit> {
    let url = match &demo.store {
        None if demo.data.is_none() => from_environment()?,
        given => given.clone(),
    };
    let Some(url) = url else {
        let folder = folder(demo)?;
        return Ok((At::File(folder.join("flights.db")), folder.join("flights.csv")));
    };
    let not_empty = |what: String| {
        let whose = if demo.store.is_some() { "" } else { " than STEADFAST_STORE's, or --data DIR" };
        Exit::other(format!("{what}; the demo needs a fresh store, give another{whose}"))
    };
    match At::read(&url)? {
        At::File(_) if demo.data.is_some() => {
            Err(Exit::refused("invalid_request", "a file has its folder: give --data, or --store sqlite:PATH"))
        }
        At::File(path) if !url.starts_with("sqlite:") => {
            let message = format!("the demo's store is a URL; give sqlite:{} or postgres://..", path.display());
            Err(Exit::refused("invalid_store", message))
        }
        At::File(path) if path.exists() => Err(not_empty(format!("{} exists", path.display()))),
        At::File(path) => {
            if let Some(folder) = path.parent().filter(|folder| !folder.as_os_str().is_empty()) {
                make(folder)?;
            }
            let output = path.with_extension("csv");
            Ok((At::File(path), output))
        }
        at @ At::Postgres(_) => {
            let workflows = Database::open(&at)?.workflows()?;
            if workflows > 0 {
                return Err(not_empty(format!("{} has {workflows} workflows", at.shown())));
            }
            Ok((at, folder(demo)?.join("flights.csv")))
        }
    }
}

fn make(folder: &Path) -> Result<(), Exit> {
    fs::create_dir_all(folder).map_err(|error| Exit::other(format!("make {}: {error}", folder.display())))
}

/// The folder that was asked for, or a new one.
fn folder(demo: &Demo) -> Result<PathBuf, Exit> {
    let folder = match &demo.data {
        Some(folder) => {
            if folder.exists() && fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_some()) {
                let message = format!("{} is not empty; give a new or empty folder", folder.display());
                return Err(Exit::other(message));
            }
            folder.clone()
        }
        None => {
            let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
            let base = Path::new("steadfast-data");
            let name =
                |n: u32| base.join(if n == 0 { format!("demo-{seconds}") } else { format!("demo-{seconds}-{n}") });
            let free = (0..).map(name).find(|folder| !folder.exists());
            free.ok_or_else(|| Exit::other("no free folder name"))?
        }
    };
    make(&folder)?;
    Ok(folder)
}

/// The importer as a child process. It does not outlive this value.
struct Importer {
    child: Child,
}

impl Importer {
    fn kill(&mut self) -> Result<(), Failure> {
        // SIGKILL: no handler runs, nothing is flushed, no lock is let go of by us.
        Ok(self.child.kill()?)
    }
}

impl Drop for Importer {
    fn drop(&mut self) {
        // Already gone, or about to be: nothing is left behind either way.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The importers, and how far they are.
struct Importing<'a> {
    demo: &'a Demo,
    at: &'a At,
    rows: u32,
    nodes: u32,
    /// The process of each node, while there is one.
    running: Vec<Mutex<Option<Importer>>>,
    /// Why one of them cannot go on: the first that cannot. Without its rows the others come to no end, and are ended.
    failed: OnceLock<Failure>,
    kills: AtomicU32,
    bar: ProgressBar,
}

/// Runs the import to its end, killing its processes on the way; answers how often.
fn drive(demo: &Demo, at: &At, rows: u32, nodes: u32) -> Result<u32, Failure> {
    // In turns, so that each is killed.
    let mut moments = vec![Vec::new(); nodes as usize];
    for (moment, node) in kill_moments(demo.kills, rows)?.into_iter().zip((0..moments.len()).cycle()) {
        moments[node].push(moment);
    }
    let import = Importing {
        demo,
        at,
        rows,
        nodes,
        running: moments.iter().map(|_| Mutex::default()).collect(),
        failed: OnceLock::new(),
        kills: AtomicU32::new(0),
        bar: bar(demo, u64::from(rows), "importing"),
    };
    std::thread::scope(|scope| {
        let drive = |(node, moments)| {
            let import = &import;
            scope.spawn(move || import.drive(node, moments).unwrap_or_else(|error| import.fail(error)))
        };
        let threads: Vec<_> = (0..nodes).zip(moments).map(drive).collect();
        for thread in threads {
            thread.join().unwrap_or_else(|_| import.fail("a thread panicked".into()));
        }
    });
    import.bar.finish_and_clear();
    if let Some(error) = import.failed.into_inner() {
        return Err(error);
    }
    Ok(import.kills.load(Ordering::Relaxed))
}

impl Importing<'_> {
    /// Runs one node until its process ends by itself, killing it when so many rows are finished, the latest moment
    /// first.
    fn drive(&self, node: u32, mut moments: Vec<u32>) -> Result<(), Failure> {
        let (mut acknowledged, mut stalled) = (0, 0);
        loop {
            let before = acknowledged;
            let output = self.spawn(node, acknowledged)?;
            let mut killed = false;
            for line in BufReader::new(output).lines() {
                // The last line of a killed process may be cut short; it is then not a progress line.
                let Ok(line) = line else { break };
                let Some(progress) = importer::Progress::read(&line) else { continue };
                acknowledged = acknowledged.max(progress.acknowledged);
                self.bar.set_position(self.bar.position().max(u64::from(progress.finished)));
                if !killed && moments.last().is_some_and(|moment| progress.finished >= *moment) {
                    moments.pop();
                    self.kill(node)?;
                    killed = true;
                    let kills = self.kills.fetch_add(1, Ordering::Relaxed) + 1;
                    self.bar.set_message(format!("killed {kills}x"));
                }
            }
            let status = self.wait(node)?;
            if !killed && status.success() {
                return Ok(());
            }
            if self.failed.get().is_some() {
                return Err("the other importer cannot go on".into());
            }
            if !killed {
                // Not our doing: give it another chance as a supervisor would, but not for ever.
                stalled = if acknowledged > before { 0 } else { stalled + 1 };
                if stalled == 3 {
                    // What it said itself stands above.
                    let message = format!("the importer ended by itself three times ({status})");
                    return Err(match status.code() {
                        Some(8) => Exit::new(8, "store_unavailable", message),
                        _ => Exit::other(message),
                    }
                    .into());
                }
            }
        }
    }

    fn running(&self, node: u32) -> std::sync::MutexGuard<'_, Option<Importer>> {
        self.running[node as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spawn(&self, node: u32, from: u32) -> Result<std::process::ChildStdout, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("demo-import").env("STEADFAST_STORE", self.at.url());
        // That nodes die is what is shown here, and no news.
        if std::env::var_os("STEADFAST_LOG").is_none() {
            command.env("STEADFAST_LOG", "error");
        }
        let numbers = [
            ("--rows", self.rows),
            ("--nodes", self.nodes),
            ("--node", node),
            ("--from", from),
            ("--kills", self.demo.kills),
        ];
        for (name, number) in numbers {
            command.arg(name).arg(number.to_string());
        }
        // One of them can have the address.
        if let Some(listen) = self.demo.listen.filter(|_| node == 0) {
            command.arg("--listen").arg(listen.to_string());
        }
        let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let output = child.stdout.take().ok_or("the importer has no output")?;
        let mut running = self.running(node);
        *running = Some(Importer { child });
        // After it is there to be found: who fails after this look kills it.
        if self.failed.get().is_some() {
            *running = None;
        }
        Ok(output)
    }

    fn kill(&self, node: u32) -> Result<(), Failure> {
        self.running(node).as_mut().map_or(Ok(()), Importer::kill)
    }

    /// Waits for the end of a process whose output has ended.
    fn wait(&self, node: u32) -> Result<ExitStatus, Failure> {
        let importer = self.running(node).take();
        Ok(importer.ok_or("the importer was ended")?.child.wait()?)
    }

    /// Ends all of them. Who fails because it was ended here is not the cause.
    fn fail(&self, error: Failure) {
        let _ = self.failed.set(error);
        for node in 0..self.nodes {
            // Dropped, and with that ended.
            drop(self.running(node).take());
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
