//! `steadfast list`.

use std::num::NonZeroUsize;

use clap::Args;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::client::{Client, read};
use crate::exit::Exit;
use crate::output::{instant, plain, print, print_json, table};
use crate::wire::Workflow;

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
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::new(50).expect("50 is not 0"), conflicts_with = "all")]
    limit: NonZeroUsize,
    /// All of them.
    #[arg(long)]
    all: bool,
    /// Where the page before ended: its `next`.
    #[arg(long, value_name = "CURSOR")]
    before: Option<String>,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Serialize)]
struct Page {
    /// Each as it came.
    workflows: Vec<Box<RawValue>>,
    next: Value,
}

impl List {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let mut query = Vec::new();
        for (key, value) in [("name", self.name), ("status", self.status), ("before", self.before)] {
            query.extend(value.map(|value| (key, value)));
        }
        let limit = if self.all { usize::MAX } else { self.limit.get() };
        let (workflows, next) = self.client.pages(&["v1", "workflows"], "workflows", query, "before", limit).await?;
        if self.client.json {
            return print_json(&Page { workflows, next });
        }
        let rows: Vec<Vec<String>> = workflows
            .iter()
            .map(|workflow| {
                let workflow: Workflow = read(workflow.get())?;
                let blocked = if workflow.blocked.is_some() { " (blocked)" } else { "" };
                Ok(vec![
                    plain(&workflow.id),
                    plain(&workflow.name),
                    format!("{}{blocked}", workflow.status),
                    workflow.step.as_deref().map_or_else(|| "-".to_owned(), plain),
                    workflow.attempt.map_or_else(|| "-".to_owned(), |attempt| attempt.to_string()),
                    workflow.updated_at.map_or_else(String::new, instant),
                ])
            })
            .collect::<Result<_, Exit>>()?;
        print(&table(&["ID", "NAME", "STATUS", "STEP", "ATTEMPT", "UPDATED"], &rows))?;
        if let Some(next) = next.as_str() {
            eprintln!("there are more: --before {next}");
        }
        Ok(())
    }
}
