//! Admission over HTTP: one start.
//!
//! `201` says that the workflow is new, `200` with `Idempotent-Replay: true` that the same request was accepted before.
//! A start without an id is given one here, before anything can go wrong with it: then even an unknown outcome names
//! the id to ask about.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Response;
use uuid::Uuid;

use crate::problem::Problem;
use crate::server::{self, App};
use crate::{body, decode, wire};

/// `POST /v1/workflows`
pub(crate) async fn start(State(app): State<Arc<App>>, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let held = body::read(&app, &parts.headers, body, app.options.start_bytes_max).await?;
    let mut asked = decode::start(&held.bytes, app.engine.limits(), app.options.variables_max)?;
    let id = named(&mut asked);
    let (engine, room) = (app.engine.clone(), held.room);
    let accepted = app
        .change(&id, async move {
            // What was a large body is now a large command in the queue, so it goes on taking its room.
            let _room = room;
            engine.start_request(asked).await
        })
        .await?;
    server::accepted(accepted.replay, &wire::Started::of(&accepted))
}

/// The id of a request, which gets one if it has none.
pub(crate) fn named(asked: &mut steadfast::Request) -> String {
    asked.id.get_or_insert_with(|| Uuid::now_v7().to_string()).clone()
}
