//! Bulk: many starts as lines of NDJSON, each with its own outcome.
//!
//! # Flow
//! Lines are read one by one and gathered into slices: up to [`SLICE_LINES`], up to [`SLICE_BYTES`], or as many as have
//! arrived when the client pauses. A slice goes to the engine as a whole, and its outcomes are sent before the next one
//! is run. So a bulk of any size holds one slice in memory, others' starts wait behind a slice and not behind the
//! bulk, and a client that sends a line and waits hears about it.
//!
//! # Lines
//! They are numbered from 1 as they stand; an empty one is skipped. A bad line fails alone. The bulk ends early after
//! one line too many, and when a line does not come in time; the last outcome then says so.
//!
//! # Clients that do not read
//! Outcomes wait in memory, bounded by the number of lines, rather than stop the reading: many clients send everything
//! before they read anything, and would otherwise wait for us while we wait for them.
//!
//! # Clients that go away
//! The lines of the slice under way are run; what came of them nobody hears. The same lines with the same ids tell.

use std::io;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use bytes::{Buf, Bytes, BytesMut};
use futures_util::{FutureExt, stream};
use http_body_util::BodyExt;
use steadfast::Accepted;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::problem::Problem;
use crate::server::App;
use crate::wire::{LineOutcome, Started};
use crate::{admission, body, decode, gate};

/// Lines in one slice: large enough to fill a batch of the committer well, small enough for others to get in between.
const SLICE_LINES: usize = 256;
/// Bytes in one slice. The line that passes them still belongs to it.
const SLICE_BYTES: usize = 2 << 20;

/// `POST /v1/workflows/bulk`
pub(crate) async fn bulk(State(app): State<Arc<App>>, request: Request) -> Response {
    let Ok(room) = app.bulk_room.clone().try_acquire_owned() else {
        let detail = "too many bulks are under way; nothing was written, try again later";
        return gate::refuse(request, Problem::new("overloaded", detail).retry_after_ms(1_000)).await;
    };
    let (parts, body) = request.into_parts();
    let (outcomes, sent) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        let _room = room;
        Intake { lines: Lines::new(body, app.options.line_bytes_max), app, outcomes }.run(&parts.headers).await;
    });
    // An end without the mark means that the intake broke off; a clean end of the body would hide that.
    let answer = stream::unfold(sent, |mut sent| async move {
        match sent.recv().await {
            Some(Sent::Outcomes(lines)) => Some((Ok(lines), sent)),
            Some(Sent::End) => None,
            None => Some((Err(io::Error::other("the bulk broke off")), sent)),
        }
    });
    let mut response = (StatusCode::OK, Body::from_stream(answer)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    response
}

enum Sent {
    Outcomes(Bytes),
    End,
}

/// A request of a line, or why it is none.
type Asked = Result<steadfast::Request, Problem>;

/// Why no further slice follows.
enum Ended {
    /// The body is over.
    Over,
    /// The client went away.
    Cut,
    /// A line did not come in time.
    Late { line: usize },
    /// There is a line too many.
    TooMany { line: usize },
}

struct Intake {
    app: Arc<App>,
    lines: Lines,
    outcomes: mpsc::UnboundedSender<Sent>,
}

impl Intake {
    async fn run(mut self, headers: &HeaderMap) {
        let deadline = Instant::now() + self.app.options.bulk_timeout;
        loop {
            let (slice, ended) = self.gather(deadline).await;
            // Nobody listens: what has not begun need not begin.
            if self.outcomes.is_closed() || matches!(ended, Some(Ended::Cut)) {
                return;
            }
            let mut text = run_slice(&self.app, slice).await;
            let last = match &ended {
                Some(Ended::Late { line }) => Some((*line, body::too_slow())),
                Some(Ended::TooMany { line }) => {
                    let limit = self.app.engine.limits().bulk_max;
                    let detail = format!("the bulk has more than {limit} lines; send several");
                    Some((*line, Problem::new("bulk_too_large", detail).limit(limit)))
                }
                _ => None,
            };
            if let Some((line, problem)) = last {
                write_line(&mut text, &LineOutcome::Refused { line, error: problem.document() });
            }
            if !text.is_empty() {
                // A client that went away hears nothing.
                let _ = self.outcomes.send(Sent::Outcomes(text.into()));
            }
            if matches!(ended, Some(Ended::TooMany { .. })) {
                // Whoever still sends is to read that first.
                body::linger(headers, &mut self.lines.body).await;
            }
            if ended.is_some() {
                let _ = self.outcomes.send(Sent::End);
                return;
            }
        }
    }

    /// Gathers the next slice, and the end if it was met.
    async fn gather(&mut self, deadline: Instant) -> (Vec<(usize, Asked)>, Option<Ended>) {
        let options = &self.app.options;
        let limits = self.app.engine.limits();
        let line_deadline = (Instant::now() + options.body_timeout).min(deadline);
        let (mut slice, mut bytes) = (Vec::new(), 0);
        while slice.len() < SLICE_LINES && bytes < SLICE_BYTES {
            let line = if slice.is_empty() {
                match tokio::time::timeout_at(line_deadline, self.lines.next()).await {
                    Ok(line) => line,
                    Err(_) => return (slice, Some(Ended::Late { line: self.lines.number + 1 })),
                }
            } else {
                match self.lines.next().now_or_never() {
                    Some(line) => line,
                    // The client pauses, so what it has sent is run.
                    None => break,
                }
            };
            let number = self.lines.number;
            let asked = match line {
                Line::End => return (slice, Some(Ended::Over)),
                // What was cut off is no line, even if it looks like one.
                Line::Cut => return (slice, Some(Ended::Cut)),
                _ if number > limits.bulk_max => return (slice, Some(Ended::TooMany { line: number })),
                Line::TooLarge => {
                    let limit = options.line_bytes_max;
                    let detail = format!("the line is larger than {limit} bytes; send it as a single start");
                    Err(Problem::new("line_too_large", detail).limit(limit))
                }
                Line::Text(text) => {
                    bytes += text.len();
                    decode::start(&text, limits, options.variables_max)
                }
            };
            slice.push((number, asked));
        }
        (slice, None)
    }
}

/// Runs a slice and writes its outcomes in order.
async fn run_slice(app: &App, slice: Vec<(usize, Asked)>) -> Vec<u8> {
    let (mut requests, mut ids) = (Vec::with_capacity(slice.len()), Vec::with_capacity(slice.len()));
    let mut verdicts = Vec::with_capacity(slice.len());
    for (line, asked) in slice {
        let verdict = asked.map(|mut asked| {
            ids.push(admission::named(&mut asked));
            requests.push(asked);
        });
        verdicts.push((line, verdict));
    }
    let mut outcomes = start(app, requests, ids).await.into_iter();
    let mut text = Vec::new();
    for (line, verdict) in verdicts {
        let outcome = verdict.and_then(|()| outcomes.next().unwrap_or_else(|| Err(Problem::internal())));
        match outcome {
            Ok(accepted) => write_line(&mut text, &LineOutcome::Started { line, started: Started::of(&accepted) }),
            Err(problem) => write_line(&mut text, &LineOutcome::Refused { line, error: problem.document() }),
        }
    }
    text
}

/// Starts what a slice asks for, within the time that a request may take.
async fn start(app: &App, requests: Vec<steadfast::Request>, ids: Vec<String>) -> Vec<Result<Accepted, Problem>> {
    if requests.is_empty() {
        return Vec::new();
    }
    match tokio::time::timeout(app.options.request_timeout, app.engine.start_many(requests)).await {
        Ok(Ok(outcomes)) => outcomes.into_iter().map(|outcome| outcome.map_err(Problem::from)).collect(),
        // Refused as a whole.
        Ok(Err(error)) => ids.iter().map(|_| Err(Problem::from(error.clone()))).collect(),
        Err(_) => ids.into_iter().map(|id| Err(Problem::unknown_outcome(id))).collect(),
    }
}

fn write_line(text: &mut Vec<u8>, outcome: &LineOutcome<'_>) {
    serde_json::to_writer(&mut *text, outcome).expect("strings and integers serialize");
    text.push(b'\n');
}

/// What stands between two line feeds.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    Text(Bytes),
    TooLarge,
    /// The body is over.
    End,
    /// The body broke off.
    Cut,
}

/// The lines of a body that are not empty. No more than a line and a frame is held.
struct Lines {
    body: Body,
    line_bytes_max: usize,
    buffer: BytesMut,
    /// How much of the buffer is known to hold no line feed.
    searched: usize,
    /// True within a line that is too large, whose bytes are dropped as they come.
    dropping: bool,
    ended: bool,
    /// The number of the last line, empty ones included.
    number: usize,
}

impl Lines {
    fn new(body: Body, line_bytes_max: usize) -> Self {
        let buffer = BytesMut::new();
        Self { body, line_bytes_max, buffer, searched: 0, dropping: false, ended: false, number: 0 }
    }

    /// The next line. A call that is given up loses nothing: what arrived stays in the buffer.
    async fn next(&mut self) -> Line {
        loop {
            if let Some(line) = self.take_line() {
                return line;
            }
            if self.ended {
                return Line::End;
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.buffer.extend_from_slice(&data);
                    }
                }
                Some(Err(_)) => return Line::Cut,
                None => self.ended = true,
            }
        }
    }

    /// A line that is complete, or known to be too large, as far as the buffer tells.
    fn take_line(&mut self) -> Option<Line> {
        loop {
            let feed = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n').map(|at| self.searched + at);
            let end = match feed {
                Some(at) => at,
                None if self.ended && (self.dropping || !self.buffer.is_empty()) => self.buffer.len(),
                None if self.dropping || self.buffer.len() > self.line_bytes_max => {
                    self.buffer.clear();
                    (self.searched, self.dropping) = (0, true);
                    return None;
                }
                None => {
                    self.searched = self.buffer.len();
                    return None;
                }
            };
            let text = self.buffer.split_to(end).freeze();
            self.buffer.advance(usize::from(feed.is_some()));
            self.searched = 0;
            self.number += 1;
            if std::mem::take(&mut self.dropping) || text.len() > self.line_bytes_max {
                return Some(Line::TooLarge);
            }
            if !text.trim_ascii().is_empty() {
                return Some(Line::Text(text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn read(frames: Vec<&'static str>) -> String {
        let frames = stream::iter(frames.into_iter().map(Ok::<_, std::convert::Infallible>));
        let mut lines = Lines::new(Body::from_stream(frames), 4);
        let mut text = Vec::new();
        loop {
            match lines.next().await {
                Line::Text(line) => text.push(format!("{} {}", lines.number, std::str::from_utf8(&line).unwrap())),
                Line::TooLarge => text.push(format!("{} too large", lines.number)),
                Line::End => return text.join(" | "),
                Line::Cut => return text.join(" | ") + " | cut",
            }
        }
    }

    #[tokio::test]
    async fn lines_are_found_however_they_arrive() {
        for (frames, expected) in [
            (vec![], ""),
            (vec!["a"], "1 a"),
            (vec!["a\n"], "1 a"),
            (vec!["a\nb"], "1 a | 2 b"),
            (vec!["a\n\n \r\nb\n\n"], "1 a | 4 b"),
            (vec!["ab", "cd", "\n", "e"], "1 abcd | 2 e"),
            (vec!["abc\n"], "1 abc"),
            (vec!["abcd\n"], "1 abcd"),
            (vec!["abcde\nf"], "1 too large | 2 f"),
            (vec!["abcd", "e", "\n", "f\n"], "1 too large | 2 f"),
            (vec!["abc", "defgh", "ijk\nf\n"], "1 too large | 2 f"),
            (vec!["abcdefgh"], "1 too large"),
            (vec!["abcde", "f"], "1 too large"),
            (vec!["a\nbcdef", "gh\n", "i"], "1 a | 2 too large | 3 i"),
            (vec!["a\r\nb\r\n"], "1 a\r | 2 b\r"),
        ] {
            assert_eq!(read(frames.clone()).await, expected, "{frames:?}");
        }
    }
}
