//! Health: whether the process lives, and whether it can serve.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;

use crate::problem::Problem;
use crate::server::{App, json};

/// A store that takes longer for its cheapest look is not ready.
const LOOK_TIME: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Alive {
    alive: bool,
}

#[derive(Serialize)]
struct Ready {
    ready: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
}

/// `GET /healthz`
pub(crate) async fn alive() -> Result<Response, Problem> {
    json(StatusCode::OK, &Alive { alive: true })
}

/// `GET /readyz`
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Result<Response, Problem> {
    match not_ready(&app).await {
        None => json(StatusCode::OK, &Ready { ready: true, reason: None }),
        reason => json(StatusCode::SERVICE_UNAVAILABLE, &Ready { ready: false, reason }),
    }
}

async fn not_ready(app: &App) -> Option<&'static str> {
    if *app.stopping.borrow() {
        return Some("stopping");
    }
    if !app.engine.is_ready() {
        return Some(if app.engine.refuses_writes() { "writes_refused" } else { "store_recovering" });
    }
    // The committer being well says nothing about whether the store can be read.
    match tokio::time::timeout(LOOK_TIME, app.engine.look(|reader| reader.next_due())).await {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.code()),
        Err(_) => Some("store_slow"),
    }
}
