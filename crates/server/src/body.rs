//! Body: reading what a client sends, within a size, a time and a memory.

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, header};
use bytes::{Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Body as HttpBody;
use tokio::sync::OwnedSemaphorePermit;

use crate::problem::Problem;
use crate::server::App;

/// Bodies up to this size are read without asking for room: every connection may hold one.
const SMALL: usize = 64 << 10;
/// How many bytes of memory a byte of body may take while it is parsed, in the worst case: an object of many short keys.
const PARSE_FACTOR: usize = 8;
/// What is taken from a client whose request was refused, so that it can read the refusal: closing on bytes that were
/// not read would reset the connection.
const LINGER_BYTES: usize = 64 << 20;
const LINGER_TIME: Duration = Duration::from_secs(5);

/// A body, and the room it takes for as long as it is held.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) bytes: Bytes,
    pub(crate) room: Option<OwnedSemaphorePermit>,
}

/// Reads a whole body of at most `limit` bytes.
pub(crate) async fn read(app: &App, headers: &HeaderMap, mut body: Body, limit: usize) -> Result<Held, Problem> {
    let declared = body.size_hint().exact();
    if let Some(size) = declared.filter(|size| *size > limit as u64) {
        linger(headers, &mut body).await;
        return Err(too_large(limit).size(size));
    }
    let expected = declared.map_or(limit, |size| usize::try_from(size).unwrap_or(limit));
    let deadline = tokio::time::Instant::now() + app.options.body_timeout;
    let mut room = None;
    let mut bytes = BytesMut::new();
    loop {
        let frame = match tokio::time::timeout_at(deadline, body.frame()).await {
            Ok(Some(Ok(frame))) => frame,
            Ok(None) => return Ok(Held { bytes: bytes.freeze(), room }),
            Ok(Some(Err(_))) => return Err(cut()),
            Err(_) => return Err(too_slow()),
        };
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit {
            drop(bytes);
            linger(headers, &mut body).await;
            return Err(too_large(limit));
        }
        if room.is_none() && bytes.len() + data.len() > SMALL {
            // All at once and before the rest is read, so that no two bodies wait for each other.
            room = Some(match tokio::time::timeout_at(deadline, reserve(app, expected)).await {
                Ok(room) => room,
                Err(_) => {
                    let detail = "too many large bodies are being read; nothing was written, try again later";
                    return Err(Problem::new("overloaded", detail).retry_after_ms(1_000));
                }
            });
            bytes.reserve(expected.saturating_sub(bytes.len()));
        }
        bytes.extend_from_slice(&data);
    }
}

async fn reserve(app: &App, size: usize) -> OwnedSemaphorePermit {
    // A body that alone takes more than all the room waits until it is alone.
    let wanted = (size * PARSE_FACTOR).min(app.options.body_memory) >> 10;
    let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
    app.body_room.clone().acquire_many_owned(wanted).await.expect("the room is never closed")
}

/// Takes what a refused client is still sending, up to a bound.
pub(crate) async fn linger(headers: &HeaderMap, body: &mut Body) {
    // Such a client waits for our word and will not send the body after a refusal.
    if headers.contains_key(header::EXPECT) || body.is_end_stream() {
        return;
    }
    let discard = async {
        let mut taken = 0;
        while taken < LINGER_BYTES
            && let Some(Ok(frame)) = body.frame().await
        {
            taken += frame.data_ref().map_or(0, Bytes::len);
        }
    };
    let _ = tokio::time::timeout(LINGER_TIME, discard).await;
}

fn too_large(limit: usize) -> Problem {
    Problem::new("body_too_large", format!("the body is larger than {limit} bytes; send less, or several requests"))
        .limit(limit)
}

pub(crate) fn too_slow() -> Problem {
    Problem::new("body_timeout", "the body did not arrive in time; nothing was written")
}

/// The client went away, so nobody reads this.
fn cut() -> Problem {
    Problem::new("invalid_request", "the body was cut off; nothing was written")
}
