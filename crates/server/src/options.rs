//! Options: where the server listens, and every bound that protects it.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Where to listen, and how much a client may take. All bounds are inclusive.
#[derive(Debug, Clone)]
pub struct Options {
    /// The address to listen on; a loopback one. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Connections open at once. The next one is answered 503 and closed.
    pub connections_max: usize,
    /// How long the head of a request may take, counted from the opening of the connection or from its first byte.
    pub header_timeout: Duration,
    /// How long a connection may rest between two requests.
    pub idle_timeout: Duration,
    /// How long a body may take to arrive; of a bulk, each of its lines.
    pub body_timeout: Duration,
    /// How long an answer may stand still because its client does not read: 64 KiB have to move within it.
    pub write_timeout: Duration,
    /// How long the engine may take. A start that takes longer is answered `outcome_unknown`.
    pub request_timeout: Duration,
    /// The longest that a result can be waited for with `wait_ms`.
    pub wait_max: Duration,
    /// How long one bulk may take in all. It is the bound for a client that sends its lines one by one.
    pub bulk_timeout: Duration,
    /// Header lines of one request.
    pub headers_max: usize,
    /// Bytes of a request's head; 8 KiB or more. It is also the size of a connection's read buffer.
    pub header_bytes_max: usize,
    /// Bytes of a start's body: room for an input and its variables at their limits.
    pub start_bytes_max: usize,
    /// Bytes of any other body.
    pub body_bytes_max: usize,
    /// Bytes of one line of a bulk. Lines are read one by one, so a bulk as a whole has no size.
    pub line_bytes_max: usize,
    /// Bulks under way at once, because each holds a slice of lines in memory.
    pub bulks_max: usize,
    /// Variables that a start may bring along.
    pub variables_max: usize,
    /// Memory for bodies over 64 KiB, counted eightfold because that is what parsing the worst of them takes. The
    /// rest waits for room.
    pub body_memory: usize,
    /// How long requests in flight may go on after the server was told to stop.
    pub grace: Duration,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7420)),
            connections_max: 1_024,
            header_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(60),
            body_timeout: Duration::from_secs(30),
            write_timeout: Duration::from_secs(30),
            request_timeout: Duration::from_secs(30),
            wait_max: Duration::from_secs(60),
            bulk_timeout: Duration::from_secs(600),
            headers_max: 100,
            header_bytes_max: 16 << 10,
            start_bytes_max: 16 << 20,
            body_bytes_max: 4 << 20,
            line_bytes_max: 2 << 20,
            bulks_max: 8,
            variables_max: 4_096,
            body_memory: 256 << 20,
            grace: Duration::from_secs(5),
        }
    }
}

impl Options {
    /// The default bounds on another address.
    pub fn on(listen: SocketAddr) -> Self {
        Self { listen, ..Self::default() }
    }
}
