//! Connection: a socket that its client cannot hold on to.
//!
//! # States
//! ```text
//! opened ──► head ──────► served ──────► idle ──► head ..
//!   header_timeout  (the route's own)    idle_timeout
//! ```
//! Until the first request, and from the first byte of a later one, the head has `header_timeout`. Between two requests
//! the connection may rest for `idle_timeout`. While a request is served nothing is asked of the client here: its body
//! has a limit of its own, and a long poll is silent on both sides. Whatever is written must move: an answer that
//! stands still for `write_timeout` ends the connection.
//!
//! hyper has one timer for the head that also runs between requests; two different limits need to know whether a byte
//! has come, which only the socket sees. A time that has passed is an error of the socket, which ends hyper's work.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use crate::options::Options;

/// What has to move within the write timeout. Two KiB a second are less than any client that reads needs.
const MOVE_BYTES: usize = 64 << 10;

/// What the socket and the service of one connection tell each other.
#[derive(Debug, Default)]
pub(crate) struct Activity {
    serving: AtomicUsize,
    requests: AtomicUsize,
}

impl Activity {
    /// A request was read; it is served until the guard is dropped.
    pub(crate) fn begin(self: &Arc<Self>) -> Serving {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.serving.fetch_add(1, Ordering::Relaxed);
        Serving(self.clone())
    }

    /// True until the first request was read.
    pub(crate) fn is_fresh(&self) -> bool {
        self.requests() == 0
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }

    fn is_serving(&self) -> bool {
        self.serving.load(Ordering::Relaxed) > 0
    }
}

/// A request is being served.
#[derive(Debug)]
pub(crate) struct Serving(Arc<Activity>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.serving.fetch_sub(1, Ordering::Relaxed);
    }
}

/// An answer's body, during which its request is served.
#[derive(Debug)]
pub(crate) struct Answer {
    body: Body,
    _serving: Serving,
}

impl Answer {
    pub(crate) fn new(body: Body, serving: Serving) -> Self {
        Self { body, _serving: serving }
    }
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What the client is waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The head of the request after so many.
    Head { after: usize },
    /// Nothing: that many requests were read, and the last one is served or the connection rests.
    Between { after: usize, resting: bool },
}

/// A socket with the timeouts of a connection.
#[derive(Debug)]
pub(crate) struct Guarded {
    socket: TcpStream,
    activity: Arc<Activity>,
    header_timeout: Duration,
    idle_timeout: Duration,
    write_timeout: Duration,
    phase: Phase,
    read_timer: Pin<Box<Sleep>>,
    write_timer: Pin<Box<Sleep>>,
    /// Bytes moved since a write first had to wait; `None` while none does.
    moved: Option<usize>,
}

impl Guarded {
    pub(crate) fn new(socket: TcpStream, activity: Arc<Activity>, options: &Options) -> Self {
        Self {
            socket,
            activity,
            header_timeout: options.header_timeout,
            idle_timeout: options.idle_timeout,
            write_timeout: options.write_timeout,
            phase: Phase::Head { after: 0 },
            read_timer: Box::pin(tokio::time::sleep(options.header_timeout)),
            write_timer: Box::pin(tokio::time::sleep(options.write_timeout)),
            moved: None,
        }
    }

    /// Bytes came.
    fn came(&mut self) {
        let read = self.activity.requests();
        if !self.activity.is_serving() && self.phase != (Phase::Head { after: read }) {
            self.phase = Phase::Head { after: read };
            self.read_timer.as_mut().reset(Instant::now() + self.header_timeout);
        }
    }

    /// Nothing came: how long may that go on?
    fn poll_patience(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let read = self.activity.requests();
        if self.activity.is_serving() {
            self.phase = Phase::Between { after: read, resting: false };
            return Poll::Pending;
        }
        let waits = match self.phase {
            Phase::Head { after } => after == read,
            Phase::Between { after, resting } => resting && after == read,
        };
        if !waits {
            self.phase = Phase::Between { after: read, resting: true };
            self.read_timer.as_mut().reset(Instant::now() + self.idle_timeout);
        }
        ready!(self.read_timer.as_mut().poll(cx));
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, "no request came in time"))
    }

    fn wrote(&mut self, result: &io::Result<usize>) {
        if let Ok(n) = result {
            self.progress(*n);
        }
    }

    fn progress(&mut self, n: usize) {
        if let Some(moved) = &mut self.moved {
            *moved += n;
            if *moved >= MOVE_BYTES {
                self.moved = None;
            }
        }
    }

    fn poll_stall(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        if self.moved.is_none() {
            self.moved = Some(0);
            self.write_timer.as_mut().reset(Instant::now() + self.write_timeout);
        }
        ready!(self.write_timer.as_mut().poll(cx));
        Poll::Ready(io::Error::new(io::ErrorKind::TimedOut, "the answer is not read"))
    }
}

impl AsyncRead for Guarded {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = buffer.filled().len();
        match Pin::new(&mut this.socket).poll_read(cx, buffer) {
            Poll::Ready(result) => {
                let n = buffer.filled().len() - before;
                if n > 0 {
                    this.came();
                    // A client that still sends has not gone away, even if it reads its answer only afterwards.
                    this.progress(n);
                }
                Poll::Ready(result)
            }
            Poll::Pending => this.poll_patience(cx).map(Err),
        }
    }
}

impl AsyncWrite for Guarded {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match Pin::new(&mut this.socket).poll_write(cx, bytes) {
            Poll::Ready(result) => {
                this.wrote(&result);
                Poll::Ready(result)
            }
            Poll::Pending => this.poll_stall(cx).map(Err),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match Pin::new(&mut this.socket).poll_write_vectored(cx, slices) {
            Poll::Ready(result) => {
                this.wrote(&result);
                Poll::Ready(result)
            }
            Poll::Pending => this.poll_stall(cx).map(Err),
        }
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        // hyper flushes the socket once all that it had to write is written: nothing waits any more.
        this.moved = None;
        Pin::new(&mut this.socket).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().socket).poll_shutdown(cx)
    }
}
