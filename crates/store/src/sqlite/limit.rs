//! Limit: what SQLite itself can do with the rows of a step, for benchmarks to compare with.
//!
//! The statements, schema, settings and row contents are those of the writer; what is left out is everything the
//! engine adds: reading and deciding, encoding events, queues between threads, waking callers.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, params};

use super::writer::{INSERT_EVENT, UPDATE_HEAD_IN_PLACE, UPSERT_VARIABLE};
use super::{SqliteStore, connect};
use crate::contract::StoreError;

/// What one run of the bare loop took.
#[derive(Debug, Clone)]
pub struct Limit {
    /// Steps written per second.
    pub steps_per_s: f64,
    /// The time of each transaction.
    pub commits: Vec<Duration>,
    /// Bytes of the file and its write-ahead log at the end.
    pub bytes: u64,
}

/// Writes `steps` steps, `batch` workflows a transaction, into a new store at `path`.
///
/// Each step is two events, the head in place and one variable, `payloads` being the two events' texts and the value.
///
/// # Errors
/// [`StoreError`] when the store cannot be made or written.
pub fn measure(path: &Path, steps: usize, batch: usize, payloads: (&str, &str, &str)) -> Result<Limit, StoreError> {
    let doing = |source| StoreError::Sqlite { doing: "measure the limit", source };
    drop(SqliteStore::open(path)?);
    let connection: Connection = connect(path)?;
    connection.execute_batch("pragma wal_autocheckpoint = 8000").map_err(doing)?;
    let batches = steps.div_ceil(batch);
    // Ten steps a workflow, as the engine's run has.
    let groups = batches.div_ceil(10);
    let workflows = i64::try_from(groups * batch).unwrap_or(i64::MAX);
    let batch_size = i64::try_from(batch).unwrap_or(i64::MAX);
    connection.execute_batch("begin immediate").map_err(doing)?;
    for number in 1..=workflows {
        connection
            .prepare_cached(
                "insert into heads (namespace, workflow, id, name, priority, created_at, updated_at, seq, status, step,
                     visit, attempt, delivery, wake, due, token, epoch, worker, boot, remote, started_at, lease_ms,
                     lease_until, step_deadline)
                 values (1, ?1, ?2, 'bench', 0, 1, 1, 1, 'running', 'start', 1, 1, 1, 0, 30001, ?3, 1, 'n1.b1.p1', 1, 0,
                     1, 30000, 30001, 600001)",
            )
            .and_then(|mut insert| {
                insert.execute(params![number, format!("0191f0a0-0000-7000-8000-{number:012}"), [7u8; 16]])
            })
            .map_err(doing)?;
    }
    connection.execute_batch("commit; pragma wal_checkpoint(truncate)").map_err(doing)?;
    let (completed, started, value) = payloads;
    let mut commits = Vec::with_capacity(batches);
    let begin = Instant::now();
    {
        let mut insert = connection.prepare(INSERT_EVENT).map_err(doing)?;
        let mut update = connection.prepare(UPDATE_HEAD_IN_PLACE).map_err(doing)?;
        let mut upsert = connection.prepare(UPSERT_VARIABLE).map_err(doing)?;
        for number in 0..batches {
            let at = Instant::now();
            connection.execute_batch("begin immediate").map_err(doing)?;
            let number = i64::try_from(number).unwrap_or(i64::MAX);
            let (group, step) = (number / 10, number % 10);
            let seq = 2 + 2 * step;
            for workflow in 1 + group * batch_size..=(group + 1) * batch_size {
                insert.execute(params![1, workflow, seq, "step_completed", 1, seq, completed]).map_err(doing)?;
                insert.execute(params![1, workflow, seq + 1, "step_started", 1, seq, started]).map_err(doing)?;
                update
                    .execute(params![
                        1,
                        workflow,
                        seq + 1,
                        seq,
                        "running",
                        None::<String>,
                        "step",
                        step + 2,
                        1,
                        1,
                        [8u8; 16],
                        1,
                        "n1.b1.p1",
                        1,
                        0,
                        seq,
                        30_000,
                        30_000 + seq,
                        600_000 + seq,
                        None::<String>
                    ])
                    .map_err(doing)?;
                upsert.execute(params![1, workflow, "result", value, seq]).map_err(doing)?;
            }
            connection.execute_batch("commit").map_err(doing)?;
            commits.push(at.elapsed());
        }
    }
    let took = begin.elapsed().as_secs_f64();
    drop(connection);
    let bytes = std::fs::metadata(path).map_or(0, |metadata| metadata.len());
    Ok(Limit { steps_per_s: (batches * batch) as f64 / took, commits, bytes })
}
