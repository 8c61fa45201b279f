//! Nodes: real processes of the real binary on one store.

use std::fs::{self, File};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, RwLock};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::common::{STUCK, Server, binary};

/// Nodes of one store; none outlives this value.
pub struct Nodes {
    store: String,
    slots: Vec<Slot>,
    folder: TempDir,
}

struct Slot {
    process: Mutex<Option<Server>>,
    /// Where it listens; none while it does not run.
    url: RwLock<Option<String>>,
}

impl Nodes {
    /// Starts so many nodes of the store.
    pub fn start(store: &str, count: usize) -> Self {
        let folder = tempfile::Builder::new().prefix("steadfast-chaos-").tempdir().expect("a folder for logs");
        let slot = || Slot { process: Mutex::default(), url: RwLock::default() };
        let slots = (0..count).map(|_| slot()).collect();
        let nodes = Self { store: store.to_owned(), slots, folder };
        for n in 0..count {
            nodes.start_again(n);
        }
        nodes
    }

    pub fn count(&self) -> usize {
        self.slots.len()
    }

    /// Where a node listens now.
    pub fn url(&self, n: usize) -> Option<String> {
        self.slots[n].url.read().expect("held for one look").clone()
    }

    fn process(&self, n: usize) -> MutexGuard<'_, Option<Server>> {
        self.slots[n].process.lock().expect("nobody panics while he holds a process")
    }

    /// The processes, by number of the node.
    pub fn pids(&self) -> Vec<Option<i32>> {
        (0..self.count()).map(|n| self.process(n).as_ref().map(Server::pid)).collect()
    }

    /// Those whose process has ended by itself.
    pub fn ended(&self) -> Vec<usize> {
        (0..self.count()).filter(|n| self.process(*n).as_mut().is_some_and(|server| !server.lives())).collect()
    }

    /// SIGKILL.
    pub fn kill(&self, n: usize) {
        *self.slots[n].url.write().expect("held for one change") = None;
        if let Some(server) = self.process(n).take() {
            server.kill();
        }
    }

    /// SIGTERM, and waits for a clean end: how long that took, and what the node said at last. Nobody is sent there any
    /// more; what is under way there goes on.
    pub fn drain(&self, n: usize) -> (Duration, String) {
        *self.slots[n].url.write().expect("held for one change") = None;
        let begin = Instant::now();
        if let Some(server) = self.process(n).take() {
            server.stop();
        }
        let took = begin.elapsed();
        (took, self.log(n).lines().last().unwrap_or_default().to_owned())
    }

    /// Starts a node that was killed. One that finds no database ends, and is started again as a supervisor does.
    pub fn start_again(&self, n: usize) {
        let begin = Instant::now();
        let server = loop {
            let log = File::options().create(true).append(true).open(self.folder.path().join(format!("node{n}.log")));
            let log = Stdio::from(log.expect("a log can be written"));
            let mut command = Command::new(binary());
            command.args(["serve", "--samples", "--store", &self.store]);
            match Server::try_start(command, log) {
                Ok(server) => break server,
                Err(said) => assert!(begin.elapsed() < STUCK, "a node does not start: {said}\n{}", self.log_tails()),
            }
            std::thread::sleep(Duration::from_millis(200));
        };
        *self.slots[n].url.write().expect("held for one change") = Some(server.url.clone());
        *self.process(n) = Some(server);
    }

    fn log(&self, n: usize) -> String {
        fs::read_to_string(self.folder.path().join(format!("node{n}.log"))).unwrap_or_default()
    }

    /// The last lines of every log.
    pub fn log_tails(&self) -> String {
        let tail = |n: usize| {
            let text = self.log(n);
            let lines: Vec<&str> = text.lines().collect();
            format!("node {n}:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"))
        };
        (0..self.count()).map(tail).collect::<Vec<_>>().join("\n")
    }

    /// How many lines of the logs hold this text.
    pub fn log_lines_with(&self, text: &str) -> usize {
        (0..self.count()).map(|n| self.log(n).lines().filter(|line| line.contains(text)).count()).sum()
    }
}
