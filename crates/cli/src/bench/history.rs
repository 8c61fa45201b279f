//! `steadfast bench history`: does a step get slower with what lies behind it?

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use steadfast::core::claim::{Announced, Steps};
use steadfast::core::snapshot::{Snapshot, Wants};
use steadfast::core::text::{Name, Namespace, Step};
use steadfast::store::sqlite::SqliteStore;
use steadfast::store::{Store, Writer};
use steadfast::{Ctx, Engine, Request, StepResult, done, step};
use tokio::sync::{Semaphore, mpsc};

use super::percentile;

type Failure = Box<dyn std::error::Error>;

/// `bench history`.
#[derive(Debug, Args)]
pub struct History {
    /// Where the scratch stores go; on the disk that is to be measured.
    #[arg(long, value_name = "DIR", default_value = "./steadfast-data")]
    data: PathBuf,
    /// Steps of the long workflow.
    #[arg(long, default_value_t = 100_000)]
    steps: usize,
    /// Finished workflows in the full store.
    #[arg(long, default_value_t = 1_000_000)]
    finished: usize,
    /// Sleeping workflows in the full store.
    #[arg(long, default_value_t = 100_000)]
    sleeping: usize,
    /// Steps, claims and sweeps measured at each point.
    #[arg(long, default_value = "300")]
    samples: NonZeroUsize,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(super) json: bool,
}

/// The time of one step, commit to next handler, of the long workflow and of a fresh one, measured by turns.
#[derive(Debug, Serialize)]
struct Point {
    steps_behind: usize,
    long_p50_ms: f64,
    fresh_p50_ms: f64,
    ratio: f64,
}

/// A look that claims or sweeps make, in the full store and in an empty one, by turns.
#[derive(Debug, Serialize)]
struct Look {
    look: &'static str,
    full_p50_us: f64,
    empty_p50_us: f64,
    ratio: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    steps: Vec<Point>,
    /// From the opening of the store to the first step of the workflow that was left waiting.
    resume_long_ms: f64,
    resume_fresh_ms: f64,
    looks: Vec<Look>,
    finished: usize,
    sleeping: usize,
    samples: usize,
}

pub(super) async fn run(args: History) -> Result<(), Failure> {
    let folder = args.data.join(format!("bench-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let measured = measure(&args, &folder).await;
    std::fs::remove_dir_all(&folder)?;
    let report = measured?;
    if args.json {
        println!("{}", serde_json::to_string(&report)?);
        return Ok(());
    }
    println!("one step, commit to next handler (p50 of {}, measured by turns):", report.samples);
    for point in &report.steps {
        println!(
            "  {:>8} steps behind it: {:.3} ms, fresh workflow {:.3} ms, ratio {:.2}",
            point.steps_behind, point.long_p50_ms, point.fresh_p50_ms, point.ratio
        );
    }
    println!(
        "resume after a restart: {:.1} ms with the long one, {:.1} ms with a fresh one",
        report.resume_long_ms, report.resume_fresh_ms
    );
    println!("with {} finished and {} sleeping workflows, against an empty store:", report.finished, report.sleeping);
    for look in &report.looks {
        println!(
            "  {:<6} {:.1} us against {:.1} us, ratio {:.2}",
            look.look, look.full_p50_us, look.empty_p50_us, look.ratio
        );
    }
    Ok(())
}

async fn measure(args: &History, folder: &Path) -> Result<Report, Failure> {
    let (steps, resume_long_ms, resume_fresh_ms) = long(args, folder).await?;
    let looks = {
        let (folder, finished, sleeping, samples) =
            (folder.to_path_buf(), args.finished, args.sleeping, args.samples.get());
        tokio::task::spawn_blocking(move || {
            looks(&folder, finished, sleeping, samples).map_err(|error| error.to_string())
        })
        .await??
    };
    Ok(Report {
        steps,
        resume_long_ms,
        resume_fresh_ms,
        looks,
        finished: args.finished,
        sleeping: args.sleeping,
        samples: args.samples.get(),
    })
}

/// A workflow that makes a step whenever it is let, and says when a step begins.
#[derive(Clone)]
struct Paced {
    let_on: Arc<Semaphore>,
    /// The next step is the last.
    last: Arc<AtomicBool>,
    began: mpsc::UnboundedSender<()>,
}

impl Paced {
    fn new() -> (Self, mpsc::UnboundedReceiver<()>) {
        let (began, begun) = mpsc::unbounded_channel();
        (Self { let_on: Arc::new(Semaphore::new(0)), last: Arc::default(), began }, begun)
    }

    async fn step(self, ctx: Ctx) -> StepResult {
        // Nobody listens any more once the benchmark is over.
        let _ = self.began.send(());
        self.let_on.acquire().await?.forget();
        ctx.set_json("result", steadfast::Json::trusted(super::RESULT))?;
        if self.last.swap(false, Ordering::Relaxed) { Ok(done(())) } else { Ok(step("step")) }
    }
}

async fn long(args: &History, folder: &Path) -> Result<(Vec<Point>, f64, f64), Failure> {
    let path = folder.join("long.db");
    let (long, mut long_begun) = Paced::new();
    let (fresh, mut fresh_begun) = Paced::new();
    let (l, f) = (long.clone(), fresh.clone());
    let open = move || {
        let (l, f) = (l.clone(), f.clone());
        Ok::<_, steadfast::Error>(
            Engine::open(&format!("sqlite:{}", path.display()))?
                .register("long", move |ctx| l.clone().step(ctx))
                .register("fresh", move |ctx| f.clone().step(ctx)),
        )
    };
    let engine = open()?.run()?;
    engine.start_request(Request::new("long").id("long")).await?;
    long_begun.recv().await.ok_or("the long workflow is gone")?;
    let mut made = 0;
    let mut points = Vec::new();
    let mut targets: Vec<usize> = [10, 1_000, 10_000].into_iter().filter(|n| *n < args.steps).collect();
    targets.push(args.steps);
    for target in targets {
        let ahead = target.saturating_sub(made);
        long.let_on.add_permits(ahead);
        for _ in 0..ahead {
            long_begun.recv().await.ok_or("the long workflow is gone")?;
        }
        made += ahead;
        let id = format!("fresh-{target}");
        engine.start_request(Request::new("fresh").id(&id)).await?;
        fresh_begun.recv().await.ok_or("the fresh workflow is gone")?;
        let (mut long_times, mut fresh_times) = (Vec::new(), Vec::new());
        for _ in 0..args.samples.get() {
            for (paced, begun, times) in
                [(&long, &mut long_begun, &mut long_times), (&fresh, &mut fresh_begun, &mut fresh_times)]
            {
                let begin = Instant::now();
                paced.let_on.add_permits(1);
                begun.recv().await.ok_or("a workflow is gone")?;
                times.push(begin.elapsed());
            }
        }
        made += args.samples.get();
        fresh.last.store(true, Ordering::Relaxed);
        fresh.let_on.add_permits(1);
        engine.handle(&id).result::<()>().await?;
        let (long_p50_ms, fresh_p50_ms) = (percentile(&mut long_times, 50), percentile(&mut fresh_times, 50));
        points.push(Point { steps_behind: target, long_p50_ms, fresh_p50_ms, ratio: long_p50_ms / fresh_p50_ms });
    }
    engine.start_request(Request::new("fresh").id("resumed")).await?;
    fresh_begun.recv().await.ok_or("the fresh workflow is gone")?;
    engine.shutdown(Duration::ZERO).await;
    while long_begun.try_recv().is_ok() || fresh_begun.try_recv().is_ok() {}
    let begin = Instant::now();
    let engine = open()?.run()?;
    let (mut resume_long_ms, mut resume_fresh_ms) = (f64::NAN, f64::NAN);
    for _ in 0..2 {
        tokio::select! {
            _ = long_begun.recv() => resume_long_ms = begin.elapsed().as_secs_f64() * 1e3,
            _ = fresh_begun.recv() => resume_fresh_ms = begin.elapsed().as_secs_f64() * 1e3,
        }
    }
    engine.shutdown(Duration::ZERO).await;
    Ok((points, resume_long_ms, resume_fresh_ms))
}

fn looks(folder: &Path, finished: usize, sleeping: usize, samples: usize) -> Result<Vec<Look>, Failure> {
    let full = filled(&folder.join("full.db"), finished, sleeping)?;
    let empty = filled(&folder.join("empty.db"), 0, 0)?;
    let (mut full_writer, mut empty_writer) = (full.writer()?, empty.writer()?);
    let announced = Arc::new(Announced {
        namespace: Namespace::default_namespace(),
        definitions: [(Name::trusted("bench"), Steps::Listed([Step::start()].into()))].into(),
    });
    let mut claim = Wants::default();
    claim.ready(&announced, 64);
    let sweep = Wants { due: Some((1_000, 512)), ..Wants::default() };
    let mut looks = Vec::new();
    for (look, wants) in [("claim", claim), ("sweep", sweep)] {
        let (mut full_times, mut empty_times) = (Vec::new(), Vec::new());
        for _ in 0..samples {
            for (writer, times) in [(&mut full_writer, &mut full_times), (&mut empty_writer, &mut empty_times)] {
                times.push(time(&mut **writer, &wants)?);
            }
        }
        let (full_p50_us, empty_p50_us) =
            (percentile(&mut full_times, 50) * 1e3, percentile(&mut empty_times, 50) * 1e3);
        looks.push(Look { look, full_p50_us, empty_p50_us, ratio: full_p50_us / empty_p50_us });
    }
    Ok(looks)
}

fn time(writer: &mut dyn Writer, wants: &Wants) -> Result<Duration, Failure> {
    let begin = Instant::now();
    writer.load(wants, &mut Snapshot::new())?;
    writer.abandon();
    Ok(begin.elapsed())
}

/// A store with 64 ready and 64 running workflows, and so many finished and sleeping ones beside them.
fn filled(path: &Path, finished: usize, sleeping: usize) -> Result<SqliteStore, Failure> {
    drop(SqliteStore::open(path)?);
    let connection = rusqlite::Connection::open(path)?;
    connection.execute_batch("pragma synchronous = off; begin")?;
    let mut last = 0;
    for (count, status, step, rank, wake, due) in [
        (finished, "completed", None, None, None, None),
        // Asleep for far longer than the benchmark runs.
        (sleeping, "sleeping", Some("start"), None, Some(1), Some(1_i64 << 50)),
        (64, "ready", Some("start"), Some(0), None, None),
    ] {
        let held = step.map(|_| 1);
        connection.execute(
            "with recursive n (n) as (select ?1 + 1 union all select n + 1 from n where n < ?1 + ?2)
             insert into heads (namespace, workflow, id, name, priority, created_at, updated_at, seq, status, step,
                 visit, attempt, delivery, rank, wake, due)
             select 1, n, printf('workflow-%09d', n), 'bench', 0, 1, 1, 0, ?3, ?4, ?5, ?5, ?5, ?6, ?7, ?8 from n
             where ?2 > 0",
            rusqlite::params![last, count as i64, status, step, held, rank, wake, due],
        )?;
        last += count as i64;
    }
    connection.execute_batch("commit")?;
    drop(connection);
    Ok(SqliteStore::open(path)?)
}
