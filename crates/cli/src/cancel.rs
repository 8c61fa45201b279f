//! `steadfast cancel`.

use clap::Args;
use reqwest::Method;
use serde_json::json;

use crate::client::Client;
use crate::exit::Exit;
use crate::output::{plain, print};
use crate::wire::Cancelled;

/// Cancels a workflow and says what that really did.
#[derive(Debug, Args)]
pub struct Cancel {
    /// The workflow's id.
    id: String,
    /// For people; it stands in the log.
    #[arg(long, default_value = "")]
    reason: String,
    #[command(flatten)]
    pub(crate) client: Client,
}

impl Cancel {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let body = json!({ "reason": self.reason, "by": "cli" }).to_string();
        let path = ["v1", "workflows", &self.id, "cancel"];
        let answer = self.client.call_repeatable(Method::POST, &path, &[], Some(body)).await?;
        if self.client.json {
            return print(&answer.text);
        }
        let cancelled: Cancelled = answer.read()?;
        print(&match cancelled.outcome.as_str() {
            "already_finished" => format!("{} had ended before: {}", plain(&self.id), cancelled.status),
            _ => format!("{} is cancelled", plain(&self.id)),
        })
    }
}
