//! Signals over HTTP: sending one, and what waits in an inbox.
//!
//! `201` says that the signal is new, `200` with `Idempotent-Replay: true` that it was accepted before. A signal without
//! an id is given one here, before anything can go wrong with it.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use steadfast::core::text::WorkflowKey;
use steadfast::store::{Reader, StoreError};
use uuid::Uuid;

use crate::look::{CHUNK, PAGE_BYTES, limit};
use crate::outcome::unknown;
use crate::params::{Params, Target};
use crate::problem::Problem;
use crate::server::{App, accepted, json};
use crate::wire::{Pending, Sent, Signals};
use crate::{body, decode};

/// `POST /v1/workflows/{id}/signals`
pub(crate) async fn send(State(app): State<Arc<App>>, target: Target, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let held = body::read(&app, &parts.headers, body, app.options.start_bytes_max).await?;
    let mut signal = decode::signal(&held.bytes, app.engine.limits())?;
    let signal_id = signal.id.get_or_insert_with(|| Uuid::now_v7().to_string()).clone();
    let (engine, id, room) = (app.engine.clone(), target.id().to_owned(), held.room);
    let sent = app
        .change(&signal_id, async move {
            // What was a large body is now a large command in the queue, so it goes on taking its room.
            let _room = room;
            engine.signal(&id, signal).await
        })
        .await?;
    accepted(sent.replay, &Sent { signal_id: sent.id.as_str(), replay: sent.replay })
}

/// `GET /v1/workflows/{id}/signals`
pub(crate) async fn pending(
    State(app): State<Arc<App>>,
    target: Target,
    mut params: Params,
) -> Result<Response, Problem> {
    let after = params.number("after", 0..=i64::MAX as u64, 0)?;
    let limit = limit(&mut params)?;
    params.end()?;
    let key = target.key.clone();
    let page = app.look(move |reader| page(reader, &key, after, limit)).await?;
    json(StatusCode::OK, &page.ok_or_else(|| unknown(&target))?)
}

fn page(reader: &dyn Reader, key: &WorkflowKey, after: u64, limit: usize) -> Result<Option<Signals>, StoreError> {
    if reader.head(key)?.is_none() {
        return Ok(None);
    }
    let (mut signals, mut bytes, mut last) = (Vec::new(), 0, after);
    loop {
        // One more than fits tells whether there is a next page.
        let chunk = reader.signals(key, last, CHUNK.min(limit + 1 - signals.len()))?;
        if chunk.is_empty() {
            return Ok(Some(Signals { signals, next: None }));
        }
        for pending in chunk {
            bytes += pending.payload.len();
            if signals.len() == limit || (bytes > PAGE_BYTES && !signals.is_empty()) {
                return Ok(Some(Signals { signals, next: Some(last) }));
            }
            last = pending.number;
            signals.push(Pending::of(pending));
        }
    }
}
