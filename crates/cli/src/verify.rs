//! `steadfast verify`.

use std::io::IsTerminal;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde_json::json;

use crate::exit::Exit;
use crate::output::{plain, print};
use crate::place::{At, Place};

/// Re-derives every workflow from its log and compares. Opens read-only, beside a running owner or without one.
#[derive(Debug, Args)]
pub struct Verify {
    #[command(flatten)]
    place: Place,
    /// One JSON object on standard output.
    #[arg(long)]
    pub(crate) json: bool,
}

impl Verify {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let at = self.place.at()?;
        let kept = match at {
            At::File(_) => "the file",
            At::Postgres(_) => "the schema as it is (a dump of it holds everything)",
        };
        let shown = !self.json && std::io::stderr().is_terminal();
        let verified = tokio::task::spawn_blocking(move || {
            let bar = if shown { ProgressBar::new_spinner() } else { ProgressBar::hidden() };
            if let Ok(style) = ProgressStyle::with_template("{spinner} {pos} workflows verified, {per_sec}") {
                bar.set_style(style);
            }
            let verified = at.reader()?.verify(&mut |done| bar.set_position(done));
            bar.finish_and_clear();
            verified
        })
        .await
        .map_err(|error| Exit::other(error.to_string()))??;
        let faults: Vec<_> = verified
            .faults
            .iter()
            .map(|fault| json!({ "workflow_id": fault.key.id, "code": fault.code, "detail": fault.detail }))
            .collect();
        if self.json {
            let report = json!({
                "workflows": verified.workflows,
                "events": verified.events,
                "fault_count": verified.fault_count,
                "faults": faults,
            });
            print(&report.to_string())?;
        } else {
            let mut text = format!("{} workflows, {} events\n", verified.workflows, verified.events);
            for fault in &verified.faults {
                text += &format!("  {}  {}: {}\n", plain(fault.key.id.as_str()), fault.code, plain(&fault.detail));
            }
            text += if verified.fault_count == 0 { "everything is as its log says\n" } else { "" };
            print(&text)?;
        }
        if verified.fault_count > 0 {
            let message = format!("{} faults; keep {kept} and restore a backup, or report it", verified.fault_count);
            return Err(Exit::new(3, "faults_found", message));
        }
        Ok(())
    }
}
