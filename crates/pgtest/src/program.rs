//! The programs of PostgreSQL: where they are, and as whom they run.

use std::ffi::OsStr;
use std::io::Write;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};
use std::{env, fs, thread};

/// The folder of the newest installed version, as Debian lays them out; elsewhere the programs are on PATH.
pub(crate) static BINARIES: LazyLock<Option<PathBuf>> = LazyLock::new(|| {
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let installed = versions.filter_map(|entry| {
        let version: f64 = entry.file_name().to_str()?.parse().ok()?;
        let binaries = entry.path().join("bin");
        binaries.join("initdb").exists().then_some((version, binaries))
    });
    installed.max_by(|a, b| a.0.total_cmp(&b.0)).map(|(_, binaries)| binaries)
});

/// Whom the servers run as and who owns their files; none when we are not root and they run as ourselves.
static SERVER_USER: LazyLock<Option<(u32, u32)>> = LazyLock::new(|| {
    if !rustix::process::geteuid().is_root() {
        return None;
    }
    let users = fs::read_to_string("/etc/passwd").expect("the list of users is readable");
    let find = |name: &str| {
        let mut fields = users.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?.split(':').skip(1);
        Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
    };
    Some(
        find("postgres").or_else(|| find("nobody")).expect("a user `postgres` or `nobody`, as PostgreSQL refuses root"),
    )
});

/// Gives a file or folder to whom the servers run as.
pub(crate) fn give_to_server(path: &Path) {
    if let Some((uid, gid)) = *SERVER_USER {
        std::os::unix::fs::chown(path, Some(uid), Some(gid))
            .unwrap_or_else(|error| panic!("give {} to the server's user: {error}", path.display()));
    }
}

/// A program of PostgreSQL, run as ourselves.
pub(crate) fn client(name: &str) -> Command {
    plain(&BINARIES.as_ref().map_or_else(|| PathBuf::from(name), |binaries| binaries.join(name)))
}

/// A program of PostgreSQL, run as one who may own a server.
pub(crate) fn owner(name: &str) -> Command {
    as_server(&BINARIES.as_ref().map_or_else(|| PathBuf::from(name), |binaries| binaries.join(name)))
}

/// Any program, run as one who may own a server; the process is the program itself, so its pid is the program's.
pub(crate) fn as_server(program: &Path) -> Command {
    match *SERVER_USER {
        None => plain(program),
        Some((uid, gid)) => {
            let mut command = plain("setpriv".as_ref());
            command.args([&format!("--reuid={uid}"), &format!("--regid={gid}"), "--clear-groups", "--"]).arg(program);
            command
        }
    }
}

/// Without what our environment may say of other servers, and in a folder that everybody may enter.
fn plain(program: &Path) -> Command {
    let mut command = Command::new(program);
    for (name, _) in env::vars_os().filter(|(name, _)| name.as_encoded_bytes().starts_with(b"PG")) {
        command.env_remove(name);
    }
    // In English, because we look for a few words in what the programs say.
    command.env("LC_ALL", "C").current_dir("/").stdin(Stdio::null());
    command
}

/// Runs a program to its end; what it printed, or what it complained of.
pub(crate) fn run(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| cannot_start(command.get_program(), &error))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(format!("{command:?}: {}\n{}{}", output.status, text(&output.stdout), text(&output.stderr))),
    }
}

pub(crate) fn cannot_start(program: &OsStr, error: &std::io::Error) -> String {
    format!("start {}: {error} (./check installs what the tests need)", program.display())
}

/// Runs statements through `psql`, each a query of its own, until the first that fails.
///
/// What they returned, a row a line and its columns parted by `|`; or what `psql` complained of. The URL is one of
/// those made here, without the parameter `schema`, which `psql` does not know.
pub fn psql(url: &str, statements: &str) -> Result<String, String> {
    let mut command = client("psql");
    // `-f -` rather than plain standard input: errors then name their line.
    command.args(["-XAtq", "-v", "ON_ERROR_STOP=1", "-f", "-", url]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| cannot_start(command.get_program(), &error))?;
    let mut input = child.stdin.take().expect("standard input is a pipe");
    let output = thread::scope(|scope| {
        // A psql that fails early closes the pipe, and says why by itself.
        scope.spawn(move || drop(input.write_all(statements.as_bytes())));
        child.wait_with_output().expect("psql runs to its end")
    });
    match output.status.success() {
        true => Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

/// A port that nobody listens on at this moment.
pub(crate) fn free_port() -> u16 {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("some port is free");
    listener.local_addr().expect("a bound socket has an address").port()
}

/// Waits until something is so; whether it came to be in time.
pub(crate) fn wait(limit: Duration, mut so: impl FnMut() -> bool) -> bool {
    let begin = Instant::now();
    loop {
        if so() {
            return true;
        }
        if begin.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(5));
    }
}
