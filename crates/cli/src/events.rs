//! `steadfast events`.

use clap::Args;
use serde::Deserialize;
use serde_json::json;
use serde_json::value::RawValue;

use crate::client::Client;
use crate::exit::Exit;
use crate::output::{instant, print, short, table};

/// Prints a workflow's events in order.
#[derive(Debug, Args)]
pub struct Events {
    /// The workflow's id.
    id: String,
    /// The first event to print.
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    from: u64,
    /// How many to print at most.
    #[arg(long, value_name = "N", default_value_t = 1_000)]
    limit: usize,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Deserialize)]
struct Event {
    seq: u64,
    at: i64,
    #[serde(rename = "type")]
    kind: String,
    /// As it is stored, in its own order.
    payload: Box<RawValue>,
}

impl Events {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let path = ["v1", "workflows", &self.id, "events"];
        let query = vec![("from", self.from.to_string())];
        let (events, next) = self.client.pages(&path, "events", query, "from", self.limit).await?;
        if self.client.json {
            let page = json!({ "events": events, "next": next });
            return print(&serde_json::to_string(&page).map_err(|error| Exit::other(error.to_string()))?);
        }
        let rows: Vec<Vec<String>> = events
            .iter()
            .filter_map(|event| serde_json::from_str::<Event>(event.get()).ok())
            .map(|event| vec![event.seq.to_string(), instant(event.at), event.kind, short(event.payload.get(), 120)])
            .collect();
        print(&table(&["SEQ", "AT", "TYPE", "PAYLOAD"], &rows))?;
        if !next.is_null() {
            eprintln!("there are more: --from {next}");
        }
        Ok(())
    }
}
