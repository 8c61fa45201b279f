//! Look: reading what is there. Every list is a page with a cursor, and a page has a size in bytes as well.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use steadfast::core::state::Status;
use steadfast::core::text::{Key, Name, Namespace, WorkflowId, WorkflowKey};
use steadfast::store::{Filter, Reader, StoreError};

use crate::outcome::{head_and_end, unknown};
use crate::params::{Params, Target};
use crate::problem::Problem;
use crate::server::{App, json};
use crate::wire::{self, Entry, Events, Scratchpad, Value, Workflow, Workflows};

/// Items of a page unless asked otherwise, and at most.
const PAGE: u64 = 50;
const PAGE_MAX: u64 = 500;
/// A page ends once it holds so many bytes of user values: 500 events of 4 MiB would be no answer.
pub(crate) const PAGE_BYTES: usize = 4 << 20;
/// How many items of unknown size are loaded together.
pub(crate) const CHUNK: usize = 16;

pub(crate) fn limit(params: &mut Params) -> Result<usize, Problem> {
    params.number("limit", 1..=PAGE_MAX, PAGE).map(|limit| limit as usize)
}

/// `GET /v1/workflows`
pub(crate) async fn list(State(app): State<Arc<App>>, mut params: Params) -> Result<Response, Problem> {
    let name = match params.text("name") {
        Some(name) => Some(Name::parse_as("name", &name, app.engine.limits())?),
        None => None,
    };
    let status = match params.text("status") {
        Some(label) => Some(Status::from_label(&label).ok_or_else(|| {
            let labels: Vec<_> = Status::ALL.into_iter().map(Status::label).collect();
            Problem::request("status", &format!("is no status; there are: {}", labels.join(", ")))
        })?),
        None => None,
    };
    let before = match params.text("before") {
        Some(text) => {
            let wrong = || Problem::request("before", "is no cursor; give the next of the page before");
            Some(wire::read_cursor(&text).ok_or_else(wrong)?)
        }
        None => None,
    };
    let limit = limit(&mut params)?;
    params.end()?;
    let filter = Filter { namespace: Namespace::default_namespace(), name, status };
    let page = app.look(move |reader| reader.list(&filter, before, limit)).await?;
    let workflow = |item: steadfast::store::Listed| Workflow::of(item.head, wire::End::default(), &app.engine);
    let workflows = page.items.into_iter().map(workflow).collect();
    json(StatusCode::OK, &Workflows { workflows, next: page.next.map(wire::cursor) })
}

/// `GET /v1/workflows/{id}`
pub(crate) async fn workflow(State(app): State<Arc<App>>, target: Target, params: Params) -> Result<Response, Problem> {
    params.end()?;
    let key = target.key.clone();
    let found = app.look(move |reader| head_and_end(reader, &key)).await?;
    let (head, end) = found.ok_or_else(|| unknown(&target))?;
    json(StatusCode::OK, &Workflow::of(head, end, &app.engine))
}

/// `GET /v1/workflows/bulk`, whose path is taken by the bulk start.
pub(crate) async fn workflow_called_bulk(state: State<Arc<App>>, params: Params) -> Result<Response, Problem> {
    workflow(state, Target::workflow(WorkflowId::trusted("bulk")), params).await
}

/// `GET /v1/workflows/{id}/why`
pub(crate) async fn why(State(app): State<Arc<App>>, target: Target, params: Params) -> Result<Response, Problem> {
    params.end()?;
    let key = target.key.clone();
    let head = app.look(move |reader| reader.head(&key)).await?.ok_or_else(|| unknown(&target))?;
    json(StatusCode::OK, &wire::Reason::of(target.id(), app.engine.why(&head)))
}

/// `GET /v1/workflows/{id}/events`
pub(crate) async fn events(
    State(app): State<Arc<App>>,
    target: Target,
    mut params: Params,
) -> Result<Response, Problem> {
    let from = params.number("from", 0..=i64::MAX as u64, 0)?;
    let limit = limit(&mut params)?;
    params.end()?;
    let key = target.key.clone();
    let page = app.look(move |reader| events_page(reader, &key, from, limit)).await?;
    json(StatusCode::OK, &page.ok_or_else(|| unknown(&target))?)
}

fn events_page(reader: &dyn Reader, key: &WorkflowKey, from: u64, limit: usize) -> Result<Option<Events>, StoreError> {
    let Some(head) = reader.head(key)? else { return Ok(None) };
    let (mut events, mut bytes, mut next) = (Vec::new(), 0, from);
    'page: while next <= head.seq && events.len() < limit {
        let chunk = reader.events(key, next, CHUNK.min(limit - events.len()))?;
        if chunk.is_empty() {
            break;
        }
        for logged in chunk {
            let seq = logged.seq;
            let entry = Entry::of(logged);
            bytes += entry.payload.len();
            if bytes > PAGE_BYTES && !events.is_empty() {
                break 'page;
            }
            events.push(entry);
            next = seq + 1;
        }
    }
    Ok(Some(Events { events, next: (next <= head.seq).then_some(next) }))
}

/// `GET /v1/workflows/{id}/scratchpad`
pub(crate) async fn scratchpad(
    State(app): State<Arc<App>>,
    target: Target,
    mut params: Params,
) -> Result<Response, Problem> {
    let after = match params.text("after") {
        Some(key) => Some(Key::parse_as("after", &key, app.engine.limits())?),
        None => None,
    };
    let limit = limit(&mut params)?;
    params.end()?;
    let key = target.key.clone();
    let page = app.look(move |reader| scratchpad_page(reader, &key, after, limit)).await?;
    json(StatusCode::OK, &page.ok_or_else(|| unknown(&target))?)
}

fn scratchpad_page(
    reader: &dyn Reader,
    key: &WorkflowKey,
    after: Option<Key>,
    limit: usize,
) -> Result<Option<Scratchpad>, StoreError> {
    if reader.head(key)?.is_none() {
        return Ok(None);
    }
    let (mut variables, mut bytes, mut last) = (Vec::<Value>::new(), 0, after);
    loop {
        // One more than fits tells whether there is a next page.
        let chunk = reader.variables(key, last.as_ref(), CHUNK.min(limit + 1 - variables.len()))?;
        if chunk.is_empty() {
            return Ok(Some(Scratchpad { variables, next: None }));
        }
        for variable in chunk {
            let name = variable.key.clone();
            let value = Value::of(variable);
            bytes += value.key.len() + value.value.len();
            if variables.len() == limit || (bytes > PAGE_BYTES && !variables.is_empty()) {
                return Ok(Some(Scratchpad { variables, next: last.map(|last| last.as_str().to_owned()) }));
            }
            variables.push(value);
            last = Some(name);
        }
    }
}

/// `GET /v1/workflows/{id}/scratchpad/{key}`
pub(crate) async fn variable(State(app): State<Arc<App>>, target: Target, params: Params) -> Result<Response, Problem> {
    params.end()?;
    let (key, name) = (target.key.clone(), target.variable.clone());
    let found = app
        .look(move |reader| match (reader.head(&key)?, name) {
            (Some(_), Some(name)) => reader.variable(&key, &name).map(Some),
            _ => Ok(None),
        })
        .await?;
    match found {
        Some(Some(variable)) => json(StatusCode::OK, &Value::of(variable)),
        Some(None) => {
            Err(Problem::new("unknown_key", "the scratchpad of this workflow has no such key").id(target.id()))
        }
        None => Err(unknown(&target)),
    }
}
