//! `steadfast list`.

use clap::Args;
use serde_json::{Value, json};

use crate::client::Client;
use crate::exit::Exit;
use crate::output::{cell, instant, print, table};

/// Lists workflows, newest first.
#[derive(Debug, Args)]
pub struct List {
    /// Of this definition.
    #[arg(long)]
    name: Option<String>,
    /// In this status: ready, sleeping, running, backoff, completed, failed, cancelled.
    #[arg(long)]
    status: Option<String>,
    /// How many at most.
    #[arg(long, value_name = "N", default_value_t = 50, conflicts_with = "all")]
    limit: usize,
    /// All of them.
    #[arg(long)]
    all: bool,
    /// Where the page before ended: its `next`.
    #[arg(long, value_name = "CURSOR")]
    before: Option<String>,
    #[command(flatten)]
    pub(crate) client: Client,
}

impl List {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let mut query = Vec::new();
        for (key, value) in [("name", self.name), ("status", self.status), ("before", self.before)] {
            query.extend(value.map(|value| (key, value)));
        }
        let limit = if self.all { usize::MAX } else { self.limit };
        let (workflows, next) = self.client.pages(&["v1", "workflows"], "workflows", query, "before", limit).await?;
        if self.client.json {
            let page = json!({ "workflows": workflows, "next": next });
            return print(&serde_json::to_string(&page).map_err(|error| Exit::other(error.to_string()))?);
        }
        let rows: Vec<Vec<String>> = workflows
            .iter()
            .filter_map(|workflow| serde_json::from_str::<Value>(workflow.get()).ok())
            .map(|workflow| {
                let status =
                    if workflow["blocked"].is_string() { "blocked".to_owned() } else { cell(&workflow["status"]) };
                vec![
                    cell(&workflow["id"]),
                    cell(&workflow["name"]),
                    status,
                    cell(&workflow["step"]),
                    cell(&workflow["attempt"]),
                    workflow["updated_at"].as_i64().map_or_else(String::new, instant),
                ]
            })
            .collect();
        print(&table(&["ID", "NAME", "STATUS", "STEP", "ATTEMPT", "UPDATED"], &rows))?;
        if let Some(next) = next.as_str() {
            eprintln!("there are more: --before {next}");
        }
        Ok(())
    }
}
