//! Proof: what the store itself says of the import.
//!
//! Read from the file after the last process has ended, by statements of its own: the engine's word is not taken for
//! it.

use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use steadfast::store::Reader;
use steadfast::store::sqlite::SqliteReader;

use super::Failure;
use super::flights::Record;
use super::importer::id;
use super::summary::{self, Summary};

/// What was found.
#[derive(Debug)]
pub(super) struct Proof {
    pub(super) workflows: u64,
    pub(super) completed: u64,
    pub(super) failed: u64,
    pub(super) lost: u64,
    pub(super) doubled: u64,
    pub(super) redelivered: u64,
    /// Step starts that no commit, failure or give-back explains.
    pub(super) unexplained: u64,
    pub(super) steps: u64,
    pub(super) events: u64,
    pub(super) faults: u64,
}

impl Proof {
    pub(super) fn holds(&self) -> bool {
        self.lost == 0 && self.doubled == 0 && self.unexplained == 0 && self.faults == 0
    }
}

fn open(store: &Path) -> Result<Connection, Failure> {
    Ok(Connection::open_with_flags(store, OpenFlags::SQLITE_OPEN_READ_ONLY)?)
}

/// How many workflows have ended.
pub(super) fn finished(store: &Path) -> Result<u32, Failure> {
    let text = "select count(*) from heads where status in ('completed', 'failed', 'cancelled')";
    Ok(open(store)?.query_row(text, [], |row| row.get(0))?)
}

/// Examines the store.
pub(super) fn prove(store: &Path, rows: u32, mut progress: impl FnMut(u64)) -> Result<Proof, Failure> {
    let verified = SqliteReader::open(store)?.verify(&mut progress)?;
    let connection = open(store)?;
    let count = |text: &str| connection.query_row(text, [], |row| row.get::<_, i64>(0)).map(i64::unsigned_abs);
    let starts = count("select count(*) from events where type = 'step_started'")?;
    let steps = count("select count(*) from events where type = 'step_completed'")?;
    let failed_attempts = count("select count(*) from events where type = 'step_failed'")?;
    let mut lost = 0;
    {
        let mut receipt = connection.prepare(
            // A row that fails a rule ends as failed with that rule's code; these two mean that it was never judged.
            "select case when h.code in ('deliveries_exhausted', 'attempts_exhausted') then h.code else h.status end
             from admissions a join heads h on h.namespace = a.namespace and h.workflow = a.workflow
             where a.namespace = 1 and a.id = ?1",
        )?;
        for (row, _) in super::flights::rows(rows) {
            let status: Option<String> =
                receipt.query_row([id(row)], |row| row.get(0)).map(Some).or_else(|error| match error {
                    rusqlite::Error::QueryReturnedNoRows => Ok(None),
                    other => Err(other),
                })?;
            if !matches!(status.as_deref(), Some("completed" | "failed")) {
                lost += 1;
            }
        }
    }
    let ended_twice = count(
        "select count(*) from (select workflow from events
             where type in ('workflow_completed', 'workflow_failed', 'workflow_cancelled')
             group by namespace, workflow having count(*) > 1)",
    )?;
    let committed_twice = count(
        "select count(*) from (select workflow from events where type = 'step_completed'
             group by namespace, workflow, payload ->> '$.step' having count(*) > 1)",
    )?;
    let surplus = count("select count(*) from heads")?.saturating_sub(u64::from(rows));
    Ok(Proof {
        workflows: count("select count(*) from heads")?,
        completed: count("select count(*) from heads where status = 'completed'")?,
        failed: count(
            "select count(*) from heads where status = 'failed'
                 and code not in ('deliveries_exhausted', 'attempts_exhausted')",
        )?,
        lost,
        doubled: ended_twice + committed_twice + surplus,
        redelivered: count(
            "select count(*) from events where type = 'step_failed' and payload ->> '$.code' = 'given_back'",
        )?,
        unexplained: starts.abs_diff(steps + failed_attempts),
        steps,
        events: verified.events,
        faults: verified.fault_count,
    })
}

/// Writes the records in row order as CSV and sums them up.
pub(super) fn write_result(store: &Path, output: &Path) -> Result<Summary, Failure> {
    let connection = open(store)?;
    let mut statement = connection.prepare(
        "select h.id, h.status, h.code, e.payload from admissions a
         join heads h on h.namespace = a.namespace and h.workflow = a.workflow
         join events e on e.namespace = h.namespace and e.workflow = h.workflow and e.seq = h.seq
         order by a.namespace, a.id",
    )?;
    let mut writer = summary::Csv::create(output)?;
    let mut summary = Summary::default();
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let (id, status): (String, String) = (row.get(0)?, row.get(1)?);
        if status == "completed" {
            #[derive(serde::Deserialize)]
            struct Completed {
                result: Record,
            }
            let payload: String = row.get(3)?;
            let completed: Completed = serde_json::from_str(&payload)?;
            writer.write(&completed.result)?;
            summary.add(&completed.result);
        } else {
            let code: Option<String> = row.get(2)?;
            summary.add_failed(&id, code.as_deref().unwrap_or(&status));
        }
    }
    writer.finish()?;
    Ok(summary)
}
