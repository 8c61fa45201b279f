//! A real `steadfast` process, started, spoken to and killed by pid.

#![allow(dead_code, reason = "each test file uses its part")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Longer than anything here takes; what waits longer is stuck.
pub const STUCK: Duration = Duration::from_secs(60);

/// The binary under test.
pub fn binary() -> &'static str {
    env!("CARGO_BIN_EXE_steadfast")
}

/// A server process. It does not outlive this value.
pub struct Server {
    child: Child,
    pub url: String,
}

impl Server {
    /// Starts `dev` on a free port and waits until it listens.
    pub fn dev(data: &Path) -> Self {
        let mut command = Command::new(binary());
        command.arg("dev");
        Self::start(command, data)
    }

    /// The same on the store of a URL.
    pub fn dev_on(url: &str) -> Self {
        let mut command = Command::new(binary());
        command.args(["dev", "--store", url]);
        Self::start_on(command)
    }

    /// Starts a prepared command, `--data` and `--listen` added, and waits until it listens.
    pub fn start(mut command: Command, data: &Path) -> Self {
        command.arg("--data").arg(data);
        Self::start_on(command)
    }

    /// The same without `--data`.
    pub fn start_on(command: Command) -> Self {
        Self::try_start(command, Stdio::null()).unwrap_or_else(|said| panic!("it said {said:?}"))
    }

    /// Starts a prepared command, `--listen` added, and waits until it listens; its log goes to `log`. What it said
    /// instead when it ended without listening.
    pub fn try_start(mut command: Command, log: Stdio) -> Result<Self, String> {
        let mut child = command
            .args(["--listen", "127.0.0.1:0"])
            .env_remove("STEADFAST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .expect("the binary starts");
        let mut output = BufReader::new(child.stdout.take().expect("its output is piped"));
        let mut server = Self { child, url: String::new() };
        let mut line = String::new();
        output.read_line(&mut line).expect("it says where it listens");
        server.url = line.strip_prefix("listening on ").ok_or_else(|| line.clone())?.trim().to_owned();
        // The rest of what it says is read and dropped, so that it never waits for us.
        std::thread::spawn(move || std::io::copy(&mut output, &mut std::io::sink()));
        Ok(server)
    }

    /// Whether the process runs.
    pub fn lives(&mut self) -> bool {
        self.child.try_wait().expect("it can be waited for").is_none()
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("pids are small")
    }

    /// SIGKILL, and waits until the process is gone.
    pub fn kill(mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    /// SIGTERM, and waits for a clean end.
    pub fn stop(mut self) {
        let pid = rustix::process::Pid::from_raw(self.pid()).expect("a pid is not 0");
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("it can be told to stop");
        let begin = Instant::now();
        while begin.elapsed() < STUCK {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                assert!(status.success(), "it ended with {status}");
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("it does not stop");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Already gone, or about to be.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs the binary to its end.
pub fn run(url: Option<&str>, args: &[&str]) -> Output {
    let mut command = Command::new(binary());
    if let Some(url) = url {
        command.env("STEADFAST_URL", url);
    }
    command.args(args).stdin(Stdio::null()).output().expect("the binary runs")
}

/// What it wrote to standard output.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// What it wrote to standard error.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// The store that `--data` names.
pub fn store(data: &Path) -> PathBuf {
    data.join("steadfast.db")
}
