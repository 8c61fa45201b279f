//! `steadfast scratchpad`.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::client::{Client, read};
use crate::exit::Exit;
use crate::output::{plain, print, print_json, short, table};

/// Prints a workflow's variables, or one of them.
#[derive(Debug, Args)]
pub struct Scratchpad {
    /// The workflow's id.
    id: String,
    /// One variable: its value is printed whole.
    key: Option<String>,
    #[command(flatten)]
    pub(crate) client: Client,
}

#[derive(Deserialize, Serialize)]
struct Variable {
    key: String,
    value: Box<RawValue>,
    seq: u64,
}

#[derive(Serialize)]
struct Page {
    variables: Vec<Variable>,
}

impl Scratchpad {
    pub(crate) async fn run(self) -> Result<(), Exit> {
        if let Some(key) = &self.key {
            let answer = self.client.get(&["v1", "workflows", &self.id, "scratchpad", key], &[]).await?;
            if self.client.json {
                return print(&answer.text);
            }
            return print(&plain(read::<Variable>(&answer.text)?.value.get()));
        }
        let path = ["v1", "workflows", &self.id, "scratchpad"];
        let (variables, _) = self.client.pages(&path, "variables", Vec::new(), "after", usize::MAX).await?;
        let variables = variables.iter().map(|text| read(text.get())).collect::<Result<Vec<Variable>, Exit>>()?;
        if self.client.json {
            return print_json(&Page { variables });
        }
        let rows: Vec<Vec<String>> = variables
            .iter()
            .map(|variable| vec![plain(&variable.key), variable.seq.to_string(), short(variable.value.get(), 120)])
            .collect();
        print(&table(&["KEY", "SEQ", "VALUE"], &rows))
    }
}
