//! `steadfast copy`.

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;
use steadfast::store::postgres::{CopyError, Progress, copy};

use crate::exit::{Exit, chain};
use crate::output::print;
use crate::place::At;

/// Copies a whole SQLite store into an empty PostgreSQL schema: receipts, logs, states, variables. Starts sent again stay
/// replays, and steps that were running are given back when a node opens the copy.
#[derive(Debug, Args)]
pub struct Copy {
    /// The SQLite store: its file, its folder or sqlite:PATH. No process may own it meanwhile; it is not changed.
    from: String,
    /// The PostgreSQL store: postgres://USER:PASSWORD@HOST/DATABASE?schema=NAME. Its schema is made when it is not there.
    #[arg(env = "STEADFAST_STORE", hide_env_values = true)]
    to: String,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Copy {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let (from, to) = self.ends()?;
        let shown = (from.display().to_string(), At::Postgres(to.clone()).shown());
        let progress = !self.json && std::io::stderr().is_terminal();
        let copied = tokio::task::spawn_blocking(move || {
            let bar = if progress { ProgressBar::new(0) } else { ProgressBar::hidden() };
            let style = ProgressStyle::with_template("{prefix:<9} [{bar:40}] {pos}/{len}  {per_sec}  {eta} left");
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            let copied = copy(&from, &to, &mut |progress| {
                let (prefix, done, all) = match progress {
                    Progress::Rows(done, all) => ("copying", done, all),
                    Progress::Verified(done, all) => ("verifying", done, all),
                };
                if bar.prefix() != prefix {
                    bar.reset();
                    bar.set_prefix(prefix);
                }
                bar.set_length(all);
                bar.set_position(done);
            });
            bar.finish_and_clear();
            copied
        })
        .await
        .map_err(|error| Exit::other(error.to_string()))??;
        if self.json {
            let report = json!({
                "from": shown.0,
                "to": shown.1,
                "workflows": copied.workflows,
                "receipts": copied.receipts,
                "events": copied.events,
                "variables": copied.variables,
                "signals": copied.signals,
                "namespaces": copied.namespaces,
                "claim_calls": copied.claim_calls,
                "epoch": copied.epoch,
                "fault_count": 0,
            });
            return print(&report.to_string());
        }
        print(&format!(
            "copied {} workflows, {} receipts, {} events, {} variables, {} signals to {}\n\
             verified before it was committed: every count agrees, everything is as its log says\n\
             the copy has epoch {}; steps that were running are given back when a node opens it\n\n\
             {} is as it was: put it away, so that nobody goes on with it by accident\n",
            copied.workflows,
            copied.receipts,
            copied.events,
            copied.variables,
            copied.signals,
            shown.1,
            copied.epoch,
            shown.0
        ))
    }

    /// The file, and the URL.
    fn ends(&self) -> Result<(PathBuf, String), Exit> {
        match (At::read(&self.from)?, At::read(&self.to)?) {
            (At::File(from), At::Postgres(to)) => {
                Ok((if from.is_dir() { from.join("steadfast.db") } else { from }, to))
            }
            (At::Postgres(_), At::Postgres(_)) => Err(Exit::refused(
                "unsupported",
                "copy reads an SQLite store; a PostgreSQL one is copied by pg_dump and pg_restore, and then marked by \
                 steadfast migrate --restored",
            )),
            (At::File(_), At::File(_)) => {
                Err(Exit::refused("unsupported", "copy writes to a PostgreSQL store; backup copies a file to a file"))
            }
            (At::Postgres(_), At::File(_)) => {
                Err(Exit::refused("unsupported", "copy goes from SQLite to PostgreSQL; there is no way back"))
            }
        }
    }
}

impl From<CopyError> for Exit {
    fn from(error: CopyError) -> Self {
        let code = match &error {
            CopyError::Store(error) => return Self::from_store(error),
            CopyError::NotEmpty { .. } | CopyError::InUse { .. } => 6,
            CopyError::Faults(_) => 3,
            CopyError::Differs { .. } => 1,
            CopyError::Unknown { .. } => 8,
        };
        Self::new(code, error.code(), chain(&error))
    }
}
