//! Proof: what the store itself says of the import.
//!
//! Read from the database after the last process has ended, by statements of its own, which are the same for both
//! databases: the engine's word is not taken for it.

use std::path::Path;

use rusqlite::{Connection, OpenFlags};
use steadfast::store::postgres::Shell;

use super::Failure;
use super::flights::{self, Record};
use super::importer::id;
use super::summary::{self, Summary};
use crate::place::At;

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
    pub(super) bytes: u64,
}

impl Proof {
    pub(super) fn holds(&self) -> bool {
        self.lost == 0 && self.doubled == 0 && self.unexplained == 0 && self.faults == 0
    }
}

/// A connection to the database of a store, for statements of one's own. They say `{schema}.` before a table, and `->`
/// and the name of a member behind a payload's column.
pub(super) enum Database {
    Sqlite(Connection),
    Postgres(Box<Shell>),
}

impl Database {
    /// Opens it.
    pub(super) fn open(at: &At) -> Result<Self, Failure> {
        Ok(match at {
            At::File(path) => Self::Sqlite(Connection::open_with_flags(path, OpenFlags::SQLITE_OPEN_READ_ONLY)?),
            At::Postgres(url) => Self::Postgres(Box::new(Shell::open(url)?)),
        })
    }

    /// Reads a number.
    fn count(&self, text: &str) -> Result<u64, Failure> {
        let mut count = None;
        match self {
            Self::Sqlite(connection) => {
                count = Some(connection.query_row(&sqlite_text(text), [], |row| row.get::<_, i64>(0))?);
            }
            Self::Postgres(shell) => shell.each(&postgres_text(text), |row| {
                count = Some(row.get::<_, i64>(0));
                Ok::<_, Failure>(())
            })?,
        }
        Ok(count.ok_or("a count has no row")?.unsigned_abs())
    }

    /// Reads rows of so many columns of text.
    fn each<const N: usize>(
        &self,
        text: &str,
        mut read: impl FnMut([Option<String>; N]) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        match self {
            Self::Sqlite(connection) => {
                let mut statement = connection.prepare(&sqlite_text(text))?;
                let mut rows = statement.query([])?;
                while let Some(row) = rows.next()? {
                    let mut columns = [const { None }; N];
                    for (n, column) in columns.iter_mut().enumerate() {
                        *column = row.get(n)?;
                    }
                    read(columns)?;
                }
                Ok(())
            }
            Self::Postgres(shell) => shell.each(&postgres_text(text), |row| read(std::array::from_fn(|n| row.get(n)))),
        }
    }

    /// How many workflows there are; none where there is no store yet.
    pub(super) fn workflows(&self) -> Result<u64, Failure> {
        if let Self::Postgres(shell) = self
            && !shell.has_store()?
        {
            return Ok(0);
        }
        self.count("select count(*) from {schema}.admissions")
    }

    /// How many workflows have ended.
    pub(super) fn finished(&self) -> Result<u32, Failure> {
        let text = "select count(*) from {schema}.heads where status in ('completed', 'failed', 'cancelled')";
        Ok(u32::try_from(self.count(text)?)?)
    }
}

fn sqlite_text(text: &str) -> String {
    text.replace("{schema}", "main").replace("payload->", "payload ->> ")
}

fn postgres_text(text: &str) -> String {
    // The shell knows the schema.
    text.replace("payload->", "payload::json ->> ")
}

/// Examines the store.
pub(super) fn prove(at: &At, rows: u32, mut progress: impl FnMut(u64)) -> Result<Proof, Failure> {
    let reader = at.reader()?;
    let verified = reader.verify(&mut progress)?;
    let bytes = match at {
        At::File(path) => std::fs::metadata(path)?.len(),
        At::Postgres(_) => reader.bytes()?,
    };
    let database = Database::open(at)?;
    let count = |text: &str| database.count(text);
    let starts = count("select count(*) from {schema}.events where type = 'step_started'")?;
    let steps = count("select count(*) from {schema}.events where type = 'step_completed'")?;
    let failed_attempts = count("select count(*) from {schema}.events where type = 'step_failed'")?;
    // What was handed over, in the order of its ids, beside what is there.
    let mut expected = flights::rows(rows).map(|(row, _)| id(row)).peekable();
    let mut lost = 0;
    database.each(
        // A row that fails a rule ends as failed with that rule's code; these two mean that it was never judged.
        "select a.id, case when h.code in ('deliveries_exhausted', 'attempts_exhausted') then h.code else h.status end
         from {schema}.admissions a join {schema}.heads h on h.namespace = a.namespace and h.workflow = a.workflow
         where a.namespace = 1 order by a.id",
        |[found, status]| {
            let found = found.ok_or("a receipt without an id")?;
            while expected.next_if(|expected| *expected < found).is_some() {
                lost += 1;
            }
            if expected.next_if(|expected| *expected == found).is_some()
                && !matches!(status.as_deref(), Some("completed" | "failed"))
            {
                lost += 1;
            }
            Ok(())
        },
    )?;
    lost += expected.count() as u64;
    let ended_twice = count(
        "select count(*) from (select workflow from {schema}.events
             where type in ('workflow_completed', 'workflow_failed', 'workflow_cancelled')
             group by namespace, workflow having count(*) > 1) twice",
    )?;
    let committed_twice = count(
        "select count(*) from (select workflow from {schema}.events where type = 'step_completed'
             group by namespace, workflow, payload->'step' having count(*) > 1) twice",
    )?;
    let workflows = count("select count(*) from {schema}.heads")?;
    Ok(Proof {
        workflows,
        completed: count("select count(*) from {schema}.heads where status = 'completed'")?,
        failed: count(
            "select count(*) from {schema}.heads where status = 'failed'
                 and code not in ('deliveries_exhausted', 'attempts_exhausted')",
        )?,
        lost,
        doubled: ended_twice + committed_twice + workflows.saturating_sub(u64::from(rows)),
        redelivered: count(
            "select count(*) from {schema}.events where type = 'step_failed' and payload->'code' = 'given_back'",
        )?,
        unexplained: starts.abs_diff(steps + failed_attempts),
        steps,
        events: verified.events,
        faults: verified.fault_count,
        bytes,
    })
}

/// Writes the records in row order as CSV and sums them up.
pub(super) fn write_result(at: &At, output: &Path) -> Result<Summary, Failure> {
    let mut writer = summary::Csv::create(output)?;
    let mut summary = Summary::default();
    Database::open(at)?.each(
        "select h.id, h.status, h.code, e.payload from {schema}.admissions a
         join {schema}.heads h on h.namespace = a.namespace and h.workflow = a.workflow
         join {schema}.events e on e.namespace = h.namespace and e.workflow = h.workflow and e.seq = h.seq
         order by a.namespace, a.id",
        |[id, status, code, payload]| {
            let (Some(id), Some(status), Some(payload)) = (id, status, payload) else {
                return Err("a workflow without an id, a status or a last event".into());
            };
            if status == "completed" {
                #[derive(serde::Deserialize)]
                struct Completed {
                    result: Record,
                }
                let completed: Completed = serde_json::from_str(&payload)?;
                writer.write(&completed.result)?;
                summary.add(&completed.result);
            } else {
                summary.add_failed(&id, code.as_deref().unwrap_or(&status));
            }
            Ok(())
        },
    )?;
    writer.finish()?;
    Ok(summary)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn proof_of(damage: &str) -> Proof {
        let folder = tempfile::tempdir().expect("a folder for tests");
        let at = At::File(folder.path().join("a.db"));
        let store = steadfast::store::sqlite::SqliteStore::open(folder.path().join("a.db")).expect("a store is made");
        drop(store);
        let At::File(path) = &at else { unreachable!("it is a file") };
        let connection = Connection::open(path).expect("it opens");
        for (number, (row, _)) in (1..).zip(flights::rows(3)) {
            let number: i64 = number;
            connection
                .execute_batch(&format!(
                    "insert into admissions values (1, '{0}', {number}, zeroblob(33), 0);
                     insert into heads (namespace, workflow, id, name, priority, created_at, updated_at, seq, status)
                         values (1, {number}, '{0}', 'flight', 0, 0, 0, 0, 'completed');
                     insert into events values (1, {number}, 1, 'step_started', 1, 0, '{{\"step\": \"start\"}}');
                     insert into events values (1, {number}, 2, 'step_completed', 1, 0, '{{\"step\": \"start\"}}');",
                    id(row)
                ))
                .expect("rows are planted");
        }
        connection.execute_batch(damage).expect("damage is planted");
        drop(connection);
        prove(&at, 3, |_| {}).expect("it is examined")
    }

    /// What it finds is told apart: each damage shows in its own figure.
    #[test]
    fn what_was_lost_or_doubled_is_found() {
        let figures = |damage: &str| {
            let Proof { lost, doubled, unexplained, redelivered, completed, .. } = proof_of(damage);
            [lost, doubled, unexplained, redelivered, completed]
        };
        for (damage, expected) in [
            ("", [0, 0, 0, 0, 3]),
            ("delete from admissions where workflow = 1", [1, 0, 0, 0, 3]),
            ("delete from admissions where workflow = 3", [1, 0, 0, 0, 3]),
            ("update heads set status = 'failed', code = 'attempts_exhausted' where workflow = 2", [1, 0, 0, 0, 2]),
            (
                "insert into events select 1, 2, 9, type, 1, 0, payload from events where workflow = 2 and seq = 2",
                [0, 1, 1, 0, 3],
            ),
            (
                "insert into events values (1, 1, 8, 'workflow_completed', 1, 0, '{}'), (1, 1, 9, 'workflow_failed', 1, 0, '{}')",
                [0, 1, 0, 0, 3],
            ),
            ("insert into events values (1, 1, 8, 'step_failed', 1, 0, '{\"code\": \"given_back\"}')", [0, 0, 1, 1, 3]),
            (
                "insert into heads (namespace, workflow, id, name, priority, created_at, updated_at, seq, status)
                     values (1, 7, 'another', 'flight', 0, 0, 0, 0, 'completed')",
                [0, 1, 0, 0, 4],
            ),
        ] {
            assert_eq!(figures(damage), expected, "{damage}");
        }
    }
}
