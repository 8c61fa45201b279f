//! Rows: where a stored row becomes a typed value.

use std::borrow::Cow;

use steadfast_core::event::Event;
use steadfast_core::head::Head;
use steadfast_core::text::{Namespace, WorkflowId, WorkflowKey};
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use crate::contract::StoreError;
use crate::stored::{self, Stored};

/// Reads the numbers that name a head.
pub(super) fn numbers(row: &Row) -> Result<(i32, i64), StoreError> {
    let unnamed = |problem| StoreError::Corrupt { what: "head", key: "?".to_owned(), problem };
    Ok((get(row, 0).map_err(unnamed)?, get(row, 1).map_err(unnamed)?))
}

/// Reads a head, from the columns that `head!` names, the first of them at `first`.
pub(super) fn head(row: &Row, first: usize, namespace: &Namespace) -> Result<Head, StoreError> {
    let unnamed = |problem| StoreError::Corrupt { what: "head", key: "?".to_owned(), problem };
    let id: &str = get(row, first + 2).map_err(unnamed)?;
    let key = WorkflowKey { namespace: namespace.clone(), id: WorkflowId::trusted(id) };
    let columns = columns(row, first, id).map_err(|problem| StoreError::Corrupt {
        what: "head",
        key: key.to_string(),
        problem,
    })?;
    columns.head(&key)
}

/// Reads which batch wrote a head, likewise.
pub(super) fn revision(row: &Row, first: usize) -> Result<i64, StoreError> {
    get(row, first + 29).map_err(|problem| StoreError::Corrupt { what: "head", key: "?".to_owned(), problem })
}

fn columns<'row>(row: &'row Row, first: usize, id: &'row str) -> Result<Stored<'row>, String> {
    let wide =
        |column: usize| -> Result<Option<i64>, String> { Ok(get::<Option<i32>>(row, first + column)?.map(i64::from)) };
    let text = |column: usize| get::<Option<&'row str>>(row, first + column);
    let long = |column: usize| get::<Option<i64>>(row, first + column);
    Ok(Stored {
        id,
        name: get(row, first + 3)?,
        options: text(4)?.map(Cow::Borrowed),
        priority: i64::from(get::<i32>(row, first + 5)?),
        created_at: get(row, first + 6)?,
        updated_at: get(row, first + 7)?,
        seq: get(row, first + 8)?,
        status: get(row, first + 9)?,
        code: text(10)?,
        step: text(11)?,
        visit: long(12)?,
        attempt: wide(13)?,
        delivery: wide(14)?,
        rank: long(15)?,
        wake: get::<Option<i16>>(row, first + 16)?.map(i64::from),
        due: long(17)?,
        token: get(row, first + 18)?,
        epoch: long(19)?,
        worker: text(20)?,
        boot: long(21)?,
        remote: get(row, first + 22)?,
        started_at: long(23)?,
        lease_ms: long(24)?,
        lease_until: long(25)?,
        step_deadline: long(26)?,
        progress: text(27)?,
        wait: text(28)?.map(Cow::Borrowed),
    })
}

fn get<'row, T: FromSql<'row>>(row: &'row Row, column: usize) -> Result<T, String> {
    row.try_get(column).map_err(|error| format!("column {column}: {error}"))
}

/// Reads an event from type, version and payload, which begin at `column`.
pub(super) fn event(row: &Row, column: usize, key: &WorkflowKey, seq: u64) -> Result<Event, StoreError> {
    let corrupt = |problem| StoreError::Corrupt { what: "event", key: key.to_string(), problem };
    let kind: &str = get(row, column).map_err(corrupt)?;
    let version: i32 = get(row, column + 1).map_err(corrupt)?;
    let payload: &str = get(row, column + 2).map_err(corrupt)?;
    stored::event(kind, i64::from(version), payload, key, seq)
}
