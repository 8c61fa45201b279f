//! The `steadfast` command: a file per verb.

mod exit;
mod output;
mod place;

mod client;
mod wire;

mod backup;
mod bench;
mod cancel;
mod copy;
mod demo;
mod events;
mod list;
mod migrate;
mod scratchpad;
mod serve;
mod show;
mod signal;
mod start;
mod verify;
mod why;

mod samples;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::exit::Exit;

/// Durable work in one binary: accept a request exactly once, run it to the end through any crash.
#[derive(Debug, Parser)]
#[command(name = "steadfast", version, propagate_version = true, after_help = exit::HELP)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Import real flights with durable workflows, in a process that is killed on the way, and prove the result.
    Demo(demo::Demo),
    /// Run a server with an embedded store and sample workflows, to try things.
    Dev(serve::Dev),
    /// Run a server.
    Serve(serve::Serve),
    /// Start a workflow.
    Start(start::Start),
    /// Show a workflow: where it stands and how it came there.
    Show(show::Show),
    /// Say why a workflow does not run now, or who runs it.
    Why(why::Why),
    /// Print a workflow's events.
    Events(events::Events),
    /// Print a workflow's variables.
    Scratchpad(scratchpad::Scratchpad),
    /// List workflows, newest first.
    List(list::List),
    /// Send a workflow a signal.
    Signal(signal::Signal),
    /// Print the signals that wait in a workflow's inbox.
    Inbox(signal::Inbox),
    /// Cancel a workflow.
    Cancel(cancel::Cancel),
    /// Re-derive every workflow of a store from its log and report any difference.
    Verify(verify::Verify),
    /// Copy a store, whole and of one moment, beside its running owner.
    Backup(backup::Backup),
    /// Copy a whole SQLite store into an empty PostgreSQL schema.
    Copy(copy::Copy),
    /// Bring a store's schema to this release.
    Migrate(migrate::Migrate),
    /// Measure this machine.
    #[command(subcommand)]
    Bench(bench::Bench),
    /// Print a completion script for a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
    /// The demo's child process.
    #[command(hide = true)]
    DemoImport(demo::Import),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return not_understood(&error),
    };
    let json = cli.verb.wants_json();
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return Exit::other(format!("start the runtime: {error}")).report(json),
    };
    let ended = runtime.block_on(cli.verb.run());
    // A look at the store that still runs is not waited for: it holds nothing that needs an end.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(exit) => exit.report(json),
    }
}

/// Says what is wrong with the command line, or the help that was asked for.
fn not_understood(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    let safe = output::without_passwords(&text);
    if safe == text {
        error.exit();
    }
    eprint!("{safe}");
    ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(2))
}

impl Verb {
    async fn run(self) -> Result<(), Exit> {
        output::log(matches!(self, Self::Dev(_) | Self::Serve(_)));
        match self {
            Self::Demo(demo) => demo::run(demo).await,
            Self::DemoImport(import) => Ok(demo::import(import).await?),
            Self::Dev(dev) => serve::dev(dev).await,
            Self::Serve(serve) => serve::serve(serve).await,
            Self::Start(start) => start.run().await,
            Self::Show(show) => show.run().await,
            Self::Why(why) => why.run().await,
            Self::Events(events) => events.run().await,
            Self::Scratchpad(scratchpad) => scratchpad.run().await,
            Self::List(list) => list.run().await,
            Self::Signal(signal) => signal.run().await,
            Self::Inbox(inbox) => inbox.run().await,
            Self::Cancel(cancel) => cancel.run().await,
            Self::Verify(verify) => verify.run().await,
            Self::Backup(backup) => backup.run().await,
            Self::Copy(copy) => copy.run().await,
            Self::Migrate(migrate) => migrate.run().await,
            Self::Bench(bench) => Ok(bench::run(bench).await?),
            Self::Completions { shell } => {
                let mut script = Vec::new();
                clap_complete::generate(shell, &mut Cli::command(), "steadfast", &mut script);
                output::print(&String::from_utf8_lossy(&script))
            }
        }
    }

    fn wants_json(&self) -> bool {
        match self {
            Self::Demo(demo) => demo.wants_json(),
            Self::Start(start) => start.client.json,
            Self::Show(show) => show.client.json,
            Self::Why(why) => why.client.json,
            Self::Events(events) => events.client.json,
            Self::Scratchpad(scratchpad) => scratchpad.client.json,
            Self::List(list) => list.client.json,
            Self::Signal(signal) => signal.client.json,
            Self::Inbox(inbox) => inbox.client.json,
            Self::Cancel(cancel) => cancel.client.json,
            Self::Verify(verify) => verify.json,
            Self::Backup(backup) => backup.json,
            Self::Copy(copy) => copy.json,
            Self::Migrate(migrate) => migrate.json,
            Self::Bench(bench) => bench.wants_json(),
            Self::Dev(_) | Self::Serve(_) | Self::Completions { .. } | Self::DemoImport(_) => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
