//! Rows: where a stored row becomes a typed value.

use std::borrow::Cow;

use rusqlite::Row;
use rusqlite::types::{FromSql, ValueRef};
use steadfast_core::event::Event;
use steadfast_core::head::Head;
use steadfast_core::json::Json;
use steadfast_core::signal::Pending;
use steadfast_core::text::{Namespace, SignalId, SignalName, WorkflowId, WorkflowKey};

use crate::contract::StoreError;
use crate::stored::{self, Stored};

/// The columns that [`head`] reads, in its order.
pub(super) const HEAD_COLUMNS: &str = "namespace, workflow, id, name, options, priority, created_at, updated_at, seq, \
     status, code, step, visit, attempt, delivery, rank, wake, due, token, epoch, worker, boot, remote, started_at, \
     lease_ms, lease_until, step_deadline, progress, wait";

/// Reads a head and its number.
pub(super) fn head(row: &Row<'_>, namespace: &Namespace) -> Result<(i64, Head), StoreError> {
    let unnamed = |problem| StoreError::Corrupt { what: "head", key: "?".to_owned(), problem };
    let number = required(row, 1).map_err(unnamed)?;
    let id: &str = required_text(row, 2).map_err(unnamed)?;
    let key = WorkflowKey { namespace: namespace.clone(), id: WorkflowId::trusted(id) };
    let columns =
        columns(row, id).map_err(|problem| StoreError::Corrupt { what: "head", key: key.to_string(), problem })?;
    Ok((number, columns.head(&key)?))
}

fn columns<'row>(row: &'row Row<'_>, id: &'row str) -> Result<Stored<'row>, String> {
    Ok(Stored {
        id,
        name: required_text(row, 3)?,
        options: text(row, 4)?.map(Cow::Borrowed),
        priority: required(row, 5)?,
        created_at: required(row, 6)?,
        updated_at: required(row, 7)?,
        seq: required(row, 8)?,
        status: required_text(row, 9)?,
        code: text(row, 10)?,
        step: text(row, 11)?,
        visit: optional(row, 12)?,
        attempt: optional(row, 13)?,
        delivery: optional(row, 14)?,
        rank: optional(row, 15)?,
        wake: optional(row, 16)?,
        due: optional(row, 17)?,
        token: match value(row, 18)? {
            ValueRef::Null => None,
            ValueRef::Blob(bytes) => Some(bytes),
            _ => return Err("its token is not a blob".to_owned()),
        },
        epoch: optional(row, 19)?,
        worker: text(row, 20)?,
        boot: optional(row, 21)?,
        remote: optional::<i64>(row, 22)?.map(|remote| remote != 0),
        started_at: optional(row, 23)?,
        lease_ms: optional(row, 24)?,
        lease_until: optional(row, 25)?,
        step_deadline: optional(row, 26)?,
        progress: text(row, 27)?,
        wait: text(row, 28)?.map(Cow::Borrowed),
    })
}

fn value<'row>(row: &'row Row<'_>, column: usize) -> Result<ValueRef<'row>, String> {
    row.get_ref(column).map_err(|error| error.to_string())
}

fn text<'row>(row: &'row Row<'_>, column: usize) -> Result<Option<&'row str>, String> {
    value(row, column)?.as_str_or_null().map_err(|_| format!("column {column} is not text"))
}

fn required_text<'row>(row: &'row Row<'_>, column: usize) -> Result<&'row str, String> {
    text(row, column)?.ok_or_else(|| format!("column {column} is empty"))
}

fn required<T: FromSql>(row: &Row<'_>, column: usize) -> Result<T, String> {
    optional(row, column)?.ok_or_else(|| format!("column {column} is empty"))
}

fn optional<T: FromSql>(row: &Row<'_>, column: usize) -> Result<Option<T>, String> {
    row.get(column).map_err(|_| format!("column {column} is not an integer"))
}

/// Reads a pending signal from number, name, id, payload and time, which begin at 0.
pub(super) fn pending(row: &Row<'_>) -> Result<Pending, rusqlite::Error> {
    Ok(Pending {
        number: row.get::<_, i64>(0)?.unsigned_abs(),
        name: SignalName::trusted(row.get::<_, String>(1)?),
        id: SignalId::trusted(row.get::<_, String>(2)?),
        payload: Json::trusted(row.get::<_, String>(3)?),
        accepted_at: row.get(4)?,
    })
}

/// Reads an event from type, version and payload, which begin at `column`.
pub(super) fn event(row: &Row<'_>, column: usize, key: &WorkflowKey, seq: u64) -> Result<Event, StoreError> {
    let corrupt = |problem| StoreError::Corrupt { what: "event", key: key.to_string(), problem };
    let kind = required_text(row, column).map_err(corrupt)?;
    let version = required(row, column + 1).map_err(corrupt)?;
    let payload = required_text(row, column + 2).map_err(corrupt)?;
    stored::event(kind, version, payload, key, seq)
}
