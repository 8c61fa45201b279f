//! Control over HTTP: what is asked of a workflow from outside its code.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use steadfast::{Cancelled, Error};

use crate::params::Target;
use crate::problem::Problem;
use crate::server::{App, json};
use crate::{body, decode, outcome, wire};

/// `POST /v1/workflows/{id}/cancel`
pub(crate) async fn cancel(State(app): State<Arc<App>>, target: Target, request: Request) -> Result<Response, Problem> {
    let (parts, body) = request.into_parts();
    let held = body::read(&app, &parts.headers, body, app.options.body_bytes_max).await?;
    let asked = decode::cancel(&held.bytes)?;
    let (engine, id) = (app.engine.clone(), target.id().to_owned());
    let cancelled = app
        .change(target.id(), async move {
            let by = asked.by.as_deref().unwrap_or("api");
            engine.cancel(&id, asked.reason.as_deref().unwrap_or_default(), by).await
        })
        .await?;
    match cancelled {
        Cancelled::Cancelled => json(StatusCode::OK, &wire::Cancelled::Cancelled),
        Cancelled::AlreadyFinished { .. } => {
            let standing = outcome::standing(&app, &target).await?;
            json(StatusCode::OK, &wire::Cancelled::AlreadyFinished(standing))
        }
        Cancelled::Unknown => Err(Error::UnknownWorkflow { id: target.key.id }.into()),
    }
}
