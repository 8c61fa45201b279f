//! `steadfast events`.

use std::num::NonZeroUsize;

use clap::Args;
use serde::Serialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::client::{Client, read};
use crate::exit::Exit;
use crate::output::{instant, print, print_json, short, table};
use crate::wire::Event;

/// Prints a workflow's events in order.
#[derive(Debug, Args)]
pub struct Events {
    /// The workflow's id.
    id: String,
    /// The first event to print.
    #[arg(long, value_name = "SEQ", default_value_t = 0)]
    from: u64,
    /// How many to print at most.
    #[arg(long, value_name = "N", default_value_t = NonZeroUsize::new(1_000).expect("1000 is not 0"))]
    limit: NonZeroUsize,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Serialize)]
struct Page {
    /// Each as it came.
    events: Vec<Box<RawValue>>,
    next: Value,
}

impl Events {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        let path = ["v1", "workflows", &self.id, "events"];
        let query = vec![("from", self.from.to_string())];
        let (events, next) = self.client.pages(&path, "events", query, "from", self.limit.get()).await?;
        if self.client.json {
            return print_json(&Page { events, next });
        }
        let rows: Vec<Vec<String>> = events
            .iter()
            .map(|event| read::<Event>(event.get()))
            .map(|event| {
                let event = event?;
                Ok(vec![event.seq.to_string(), instant(event.at), event.r#type, short(event.payload.get(), 120)])
            })
            .collect::<Result<_, Exit>>()?;
        print(&table(&["SEQ", "AT", "TYPE", "PAYLOAD"], &rows))?;
        if !next.is_null() {
            eprintln!("there are more: --from {next}");
        }
        Ok(())
    }
}
