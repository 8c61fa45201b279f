//! Another process that owns or uses a server.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

pub struct Owner {
    pub child: Child,
    pub url: String,
    /// The process ends in good order when this is closed.
    _input: ChildStdin,
}

/// Starts the program of this crate, and waits for its URL.
pub fn start(words: &[&str]) -> Owner {
    let mut command = Command::new(env!("CARGO_BIN_EXE_steadfast-pgtest"));
    let mut child = command.args(words).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut url = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut url).unwrap();
    let input = child.stdin.take().unwrap();
    Owner { child, url: url.trim().to_owned(), _input: input }
}

impl Owner {
    /// `127.0.0.1:PORT`
    pub fn address(&self) -> &str {
        self.url.split_once('@').unwrap().1.split_once('/').unwrap().0
    }

    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn close(self) {
        let Self { mut child, _input, .. } = self;
        drop(_input);
        assert!(child.wait().unwrap().success());
    }
}

pub fn listens(address: &str) -> bool {
    TcpStream::connect(address).is_ok()
}

pub fn within(limit: Duration, what: &str, mut so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < limit, "not within {limit:?}: {what}");
        thread::sleep(Duration::from_millis(10));
    }
}
