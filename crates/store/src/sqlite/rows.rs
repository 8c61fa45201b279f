//! Rows: where a stored row becomes a typed value, and back. A combination that means nothing is corruption.

use std::sync::{Arc, OnceLock};

use rusqlite::Row;
use rusqlite::types::ValueRef;
use steadfast_core::event::Event;
use steadfast_core::head::{Claim, Head, Placed, Token, Wake, WorkerRef};
use steadfast_core::json::Json;
use steadfast_core::options::Options;
use steadfast_core::state::{State, Status, Visit};
use steadfast_core::text::{FailureCode, Name, Namespace, Step, WorkflowId, WorkflowKey};

use crate::contract::StoreError;

/// The columns that [`head`] reads, in its order.
pub(super) const HEAD_COLUMNS: &str = "namespace, workflow, id, name, options, priority, created_at, updated_at, seq, \
     status, code, step, visit, attempt, delivery, rank, wake, due, token, epoch, worker, boot, remote, started_at, \
     lease_ms, lease_until, step_deadline, progress";

pub(super) fn wake_number(wake: Wake) -> i64 {
    match wake {
        Wake::Lease => 0,
        Wake::Timer => 1,
    }
}

/// Reads a head and its number.
pub(super) fn head(row: &Row<'_>, namespace: &Namespace) -> Result<(i64, Head), StoreError> {
    let number = integer(row, 1)?;
    let id = text(row, 2)?;
    read(row, namespace, id)
        .map_err(|problem| StoreError::Corrupt { what: "head", key: id.to_owned(), problem })
        .map(|head| (number, head))
}

fn read(row: &Row<'_>, namespace: &Namespace, id: &str) -> Result<Head, String> {
    let key = WorkflowKey { namespace: namespace.clone(), id: WorkflowId::trusted(id) };
    let options = options(row)?;
    let priority = options.priority;
    let status = required_text(row, 9)?;
    let status = Status::from_label(status).ok_or("its status is not known to this release")?;
    let mut claim = None;
    let state = match status {
        Status::Completed => State::Completed,
        Status::Cancelled => State::Cancelled,
        Status::Failed => State::Failed { code: FailureCode::trusted(required_text(row, 10)?) },
        live => {
            let visit = Visit {
                step: Step::trusted(required_text(row, 11)?),
                visit: count(row, 12)?,
                attempt: count(row, 13)?,
                delivery: count(row, 14)?,
            };
            match live {
                Status::Ready => {
                    State::Ready { visit, since: required(row, 15)?.saturating_add(i64::from(priority) * 1_000) }
                }
                Status::Sleeping => State::Sleeping { visit, until: due(row, Wake::Timer)? },
                Status::Backoff => State::Backoff { visit, until: due(row, Wake::Timer)? },
                _ => {
                    let open = read_claim(row)?;
                    let token_digest = open.token.digest();
                    claim = Some(open);
                    State::Running { visit, token_digest }
                }
            }
        }
    };
    let head = Head {
        key,
        name: Name::trusted(required_text(row, 3)?),
        options,
        seq: count(row, 8)?,
        state,
        claim,
        created_at: required(row, 6)?,
        updated_at: required(row, 7)?,
    };
    let stored = Placed {
        rank: optional(row, 15)?,
        due: match (optional(row, 16)?, optional(row, 17)?) {
            (None, None) => None,
            (Some(0), Some(due)) => Some((Wake::Lease, due)),
            (Some(1), Some(due)) => Some((Wake::Timer, due)),
            _ => return Err("its wake and due do not belong together".to_owned()),
        },
    };
    if stored != head.placed() {
        return Err("its place in a scheduling index is not that of its status".to_owned());
    }
    Ok(head)
}

fn read_claim(row: &Row<'_>) -> Result<Claim, String> {
    let token = match row.get_ref(18).map_err(|error| error.to_string())? {
        ValueRef::Blob(bytes) => Token(bytes.try_into().map_err(|_| "its token is not 16 bytes long")?),
        _ => return Err("it runs without a token".to_owned()),
    };
    let progress = match row.get_ref(27).map_err(|error| error.to_string())? {
        ValueRef::Null => None,
        _ => Some(Json::trusted(required_text(row, 27)?)),
    };
    Ok(Claim {
        token,
        epoch: count(row, 19)?,
        worker: WorkerRef {
            label: required_text(row, 20)?.into(),
            boot: count(row, 21)?,
            remote: required(row, 22)? != 0,
        },
        started_at: required(row, 23)?,
        lease_ms: count(row, 24)?,
        lease_until: required(row, 25)?,
        step_deadline: required(row, 26)?,
        look_at: due(row, Wake::Lease)?,
        progress,
    })
}

fn options(row: &Row<'_>) -> Result<Arc<Options>, String> {
    static STANDARD: OnceLock<Arc<Options>> = OnceLock::new();
    match row.get_ref(4).map_err(|error| error.to_string())? {
        ValueRef::Null => Ok(STANDARD.get_or_init(|| Arc::new(Options::default())).clone()),
        _ => serde_json::from_str(required_text(row, 4)?)
            .map(Arc::new)
            .map_err(|error| format!("its options cannot be read (column {})", error.column())),
    }
}

/// The options as they are stored: nothing for the defaults.
pub(super) fn stored_options(options: &Options) -> Option<String> {
    (*options != Options::default()).then(|| serde_json::to_string(options).expect("options hold integers and strings"))
}

fn due(row: &Row<'_>, wake: Wake) -> Result<i64, String> {
    if required(row, 16)? != wake_number(wake) {
        return Err("it waits for another clock than its status says".to_owned());
    }
    required(row, 17)
}

fn text<'row>(row: &'row Row<'_>, column: usize) -> Result<&'row str, StoreError> {
    required_text(row, column).map_err(|problem| StoreError::Corrupt { what: "head", key: "?".to_owned(), problem })
}

fn integer(row: &Row<'_>, column: usize) -> Result<i64, StoreError> {
    required(row, column).map_err(|problem| StoreError::Corrupt { what: "head", key: "?".to_owned(), problem })
}

fn required_text<'row>(row: &'row Row<'_>, column: usize) -> Result<&'row str, String> {
    let value = row.get_ref(column).map_err(|error| error.to_string())?;
    value.as_str().map_err(|_| format!("column {column} is not text"))
}

fn required(row: &Row<'_>, column: usize) -> Result<i64, String> {
    optional(row, column)?.ok_or_else(|| format!("column {column} is empty"))
}

fn optional(row: &Row<'_>, column: usize) -> Result<Option<i64>, String> {
    row.get(column).map_err(|_| format!("column {column} is not an integer"))
}

fn count<T: TryFrom<i64>>(row: &Row<'_>, column: usize) -> Result<T, String> {
    T::try_from(required(row, column)?).map_err(|_| format!("column {column} is out of range"))
}

/// Reads an event from type, version and payload, which begin at `column`.
pub(super) fn event(row: &Row<'_>, column: usize, key: &WorkflowKey, seq: u64) -> Result<Event, StoreError> {
    let corrupt = |problem| StoreError::Corrupt { what: "event", key: key.to_string(), problem };
    let kind = required_text(row, column).map_err(corrupt)?;
    let version = count(row, column + 1).map_err(corrupt)?;
    let payload = required_text(row, column + 2).map_err(corrupt)?;
    Event::decode(kind, version, payload).map_err(|source| StoreError::Event { key: key.clone(), seq, source })
}
