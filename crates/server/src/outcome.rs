//! Outcome: how a workflow ended, now or when it has.
//!
//! A wait is a long poll: it ends with the workflow, with its time, or with the server, whichever is first, and a
//! client that hears 202 asks again.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use steadfast::Error;
use steadfast::core::head::Head;
use steadfast::core::text::WorkflowKey;
use steadfast::store::{Reader, StoreError};

use crate::params::{Params, Target};
use crate::problem::Problem;
use crate::server::{App, json};
use crate::wire::{End, Standing};

/// `GET /v1/workflows/{id}/result`
pub(crate) async fn result(
    State(app): State<Arc<App>>,
    target: Target,
    mut params: Params,
) -> Result<Response, Problem> {
    let wait_max = u64::try_from(app.options.wait_max.as_millis()).unwrap_or(u64::MAX);
    let wait_ms = params.number("wait_ms", 0..=wait_max, 0)?;
    params.end()?;
    let (mut ended, mut standing) = look(&app, &target).await?;
    if !ended && wait_ms > 0 {
        let handle = app.engine.handle(target.id());
        tokio::select! {
            end = handle.end() => {
                end?;
            }
            () = tokio::time::sleep(Duration::from_millis(wait_ms)) => {}
            () = app.stopped() => {}
        }
        (ended, standing) = look(&app, &target).await?;
    }
    json(if ended { StatusCode::OK } else { StatusCode::ACCEPTED }, &standing)
}

/// Where a workflow stands now.
pub(crate) async fn standing(app: &App, target: &Target) -> Result<Standing, Problem> {
    Ok(look(app, target).await?.1)
}

async fn look(app: &App, target: &Target) -> Result<(bool, Standing), Problem> {
    let key = target.key.clone();
    let (head, end) = app.look(move |reader| head_and_end(reader, &key)).await?.ok_or_else(|| unknown(target))?;
    let status = head.status();
    Ok((status.is_terminal(), Standing { status: status.label(), end }))
}

/// A workflow's state, and its end if it has one: what ended it is the last event of its log.
pub(crate) fn head_and_end(reader: &dyn Reader, key: &WorkflowKey) -> Result<Option<(Head, End)>, StoreError> {
    let Some(head) = reader.head(key)? else { return Ok(None) };
    let end = if head.status().is_terminal() {
        reader.events(key, head.seq, 1)?.pop().map(|last| End::of(last.event)).unwrap_or_default()
    } else {
        End::default()
    };
    Ok(Some((head, end)))
}

pub(crate) fn unknown(target: &Target) -> Problem {
    Error::UnknownWorkflow { id: target.key.id.clone() }.into()
}
