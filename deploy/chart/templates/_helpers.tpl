{{/* The enabled models, each with what it leaves out: {"models": [...]} as JSON. */}}
{{- define "quartet.models" -}}
{{- $models := list -}}
{{- $names := list -}}
{{- range .Values.servingEngineSpec.modelSpec -}}
  {{- $model := mustMergeOverwrite (deepCopy $.Values.servingEngineSpec.modelDefaults) (deepCopy .) -}}
  {{- if $model.enabled -}}
    {{- if has $model.name $names -}}{{- fail (printf "modelSpec: two models are named %s" $model.name) -}}{{- end -}}
    {{- $names = append $names $model.name -}}
    {{- $models = append $models $model -}}
  {{- end -}}
{{- end -}}
{{- dict "models" $models | toJson -}}
{{- end -}}

{{/* All templates below take {"root": $, "model": one of quartet.models}. */}}
{{- define "quartet.fullname" -}}
{{- printf "%s-%s" .root.Release.Name .model.name | trunc 45 | trimSuffix "-" -}}
{{- end -}}

{{- define "quartet.selector" -}}
app.kubernetes.io/name: quartet
app.kubernetes.io/instance: {{ .root.Release.Name }}
model: {{ .model.name }}
{{- end -}}

{{- define "quartet.labels" -}}
{{ include "quartet.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{- define "quartet.podLabels" -}}
{{ include "quartet.labels" . }}
llm-d.ai/engine-type: vllm
{{- with .model.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "quartet.claim" -}}
{{- if .model.pvcExistingClaimName -}}
{{ .model.pvcExistingClaimName }}
{{- else if .model.pvcStorage -}}
{{ include "quartet.fullname" . }}-models
{{- end -}}
{{- end -}}

{{/* The Serve config: `quartet serve` reads it in pods, and KubeRay sends it to a RayService. */}}
{{- define "quartet.config" -}}
{{- $model := .model -}}
{{- $ray := $model.raySpec.enabled -}}
{{- $keys := .root.Values.servingEngineSpec.apiKeys -}}
{{- $engine := $model.quartetConfig -}}
{{- $metrics := dict "host" "0.0.0.0" "port" 9401 "discovery" (dict "host" "0.0.0.0" "port" 9464) -}}
{{- if not $ray -}}{{- $_ := set $metrics "on_api" true -}}{{- end -}}
{{- $limits := dict "request_timeout_s" $model.requestTimeoutSeconds -}}
{{- $args := dict "model" $model.modelURL "served_model_name" $model.name "tp" $engine.tensorParallelSize -}}
{{- $_ := set $args "max_len" $engine.maxModelLen -}}
{{- $_ = set $args "max_seqs" $engine.maxNumSeqs -}}
{{- $_ = set $args "memory_fraction" $engine.gpuMemoryUtilization -}}
{{- $_ = set $args "dtype" $engine.dtype -}}
{{- $_ = set $args "device" (ternary "cuda" "cpu" (gt (int $model.requestGPU) 0)) -}}
{{- $_ = set $args "boot_timeout_s" $model.bootTimeoutSeconds -}}
{{- $_ = set $args "limits" $limits -}}
{{- $_ = set $args "metrics" $metrics -}}
{{- if $ray -}}{{- $_ = set $args "wait_for_nodes" true -}}{{- end -}}
{{- with $model.modelRevision -}}{{- $_ = set $args "revision" . -}}{{- end -}}
{{- if $keys.secretName -}}{{- $_ = set $args "keys" (dict "file" (printf "/etc/quartet/keys/%s" $keys.secretKey)) -}}{{- end -}}
{{- $args = mustMergeOverwrite $args (deepCopy $engine.extraArgs) -}}
{{- if and (gt (int $model.requestGPU) 0) (ne (int $model.requestGPU) (int $args.tp)) -}}
  {{- fail (printf "model %s: requestGPU %d and tensorParallelSize %d: a replica takes a GPU for each rank" $model.name (int $model.requestGPU) (int $args.tp)) -}}
{{- end -}}
{{- $deployment := dict "name" "Quartet" -}}
{{- $_ = set $deployment "ray_actor_options" (dict "num_cpus" 1 "num_gpus" (int $model.requestGPU)) -}}
{{- $_ = set $deployment "graceful_shutdown_timeout_s" (add (int $model.requestTimeoutSeconds) 10) -}}
{{- $_ = set $deployment "health_check_period_s" 2 -}}
{{- $_ = set $deployment "health_check_timeout_s" 10 -}}
{{- if $ray -}}
  {{- $_ = set $deployment "max_replicas_per_node" 1 -}}
  {{- if $model.autoscaling.enabled -}}
    {{- $policy := dict "policy_function" "deploy.scaling:Scaling" "policy_kwargs" (dict "slots" 0.8 "kv" 0.8 "waiting_tokens" 16384) -}}
    {{- $scaling := dict "min_replicas" (int $model.autoscaling.minReplicas) "max_replicas" (int $model.autoscaling.maxReplicas) -}}
    {{- $scaling = merge $scaling (dict "look_back_period_s" 30 "upscale_delay_s" 10 "downscale_delay_s" 600 "policy" $policy) -}}
    {{- $_ = set $deployment "autoscaling_config" $scaling -}}
  {{- else -}}
    {{- $_ = set $deployment "num_replicas" (int $model.replicaCount) -}}
  {{- end -}}
{{- end -}}
{{- $wait := add (int $model.bootTimeoutSeconds) (int $model.requestTimeoutSeconds) -}}
http_options:
  host: 0.0.0.0
  port: 8000
  keep_alive_timeout_s: 75
  request_timeout_s: {{ $wait }}
proxy_location: {{ ternary "EveryNode" "HeadOnly" $ray }}
applications:
  - name: {{ $model.name }}
    route_prefix: /
    import_path: deploy.app:build
    args:
      {{- toYaml $args | nindent 6 }}
    deployments:
      - {{- toYaml $deployment | nindent 8 }}
{{- end -}}

{{- define "quartet.image" -}}
image: "{{ .model.repository }}:{{ .model.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .model.imagePullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{- define "quartet.env" -}}
{{- $claim := include "quartet.claim" . -}}
env:
  - {name: HF_HOME, value: {{ ternary "/models/huggingface" "/var/cache/quartet/huggingface" (ne $claim "") }}}
{{- if .model.offline }}
  - {name: HF_HUB_OFFLINE, value: "1"}
{{- end }}
{{- if .model.hf_token.secretName }}
  - name: HF_TOKEN
    valueFrom: {secretKeyRef: {name: {{ .model.hf_token.secretName }}, key: {{ .model.hf_token.secretKey }}}}
{{- end }}
{{- with .model.env }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .model.envFromSecret.name }}
envFrom:
  - secretRef: {name: {{ . }}}
{{- end }}
{{- end -}}

{{- define "quartet.mounts" -}}
volumeMounts:
  - {name: config, mountPath: /etc/quartet/config, readOnly: true}
  - {name: cache, mountPath: /var/cache/quartet}
  - {name: tmp, mountPath: /tmp}
{{- if .root.Values.servingEngineSpec.apiKeys.secretName }}
  - {name: keys, mountPath: /etc/quartet/keys, readOnly: true}
{{- end }}
{{- if include "quartet.claim" . }}
  - {name: models, mountPath: /models}
{{- end }}
{{- end -}}

{{- define "quartet.volumes" -}}
volumes:
  - name: config
    configMap: {name: {{ include "quartet.fullname" . }}-config}
  - name: cache
    emptyDir: {}
  - name: tmp
    emptyDir: {}
{{- with .root.Values.servingEngineSpec.apiKeys.secretName }}
  - name: keys
    secret: {secretName: {{ . }}}
{{- end }}
{{- with include "quartet.claim" . }}
  - name: models
    persistentVolumeClaim: {claimName: {{ . }}}
{{- end }}
{{- end -}}

{{- define "quartet.resources" -}}
resources:
  requests:
    cpu: {{ .model.requestCPU | quote }}
    memory: {{ .model.requestMemory }}
{{- if gt (int .model.requestGPU) 0 }}
    {{ .model.requestGPUType }}: {{ int .model.requestGPU | quote }}
{{- end }}
{{- if or .model.limitCPU .model.limitMemory (gt (int .model.requestGPU) 0) }}
  limits:
{{- with .model.limitCPU }}
    cpu: {{ . | quote }}
{{- end }}
{{- with .model.limitMemory }}
    memory: {{ . }}
{{- end }}
{{- if gt (int .model.requestGPU) 0 }}
    {{ .model.requestGPUType }}: {{ int .model.requestGPU | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* What every pod has in its spec: who it runs as, and how long it may take to end. Only Ray's autoscaler, in the head, asks the
     API server. */}}
{{- define "quartet.podSpec" -}}
automountServiceAccountToken: {{ eq (.kind | default "") "head" }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add (int .model.requestTimeoutSeconds) (ternary 370 60 .model.raySpec.enabled) }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .model.serviceAccountName }}
serviceAccountName: {{ . }}
{{- end }}
{{- with .model.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .model.imagePullSecret }}
imagePullSecrets: [{name: {{ . }}}]
{{- end }}
{{- end -}}

{{/* Where the pods with replicas may run. */}}
{{- define "quartet.placement" -}}
{{- with .model.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with .model.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .model.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .model.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .model.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The start of a Ray pod: the image itself prints the environment that `ray start` needs. "kind" is head or node. As process 1
     Ray would not hear SIGTERM, and each pod would take all of its grace to end. */}}
{{- define "quartet.rayStart" -}}
command: ["/bin/bash", "-c", "--"]
args:
  - |
    settings="$(quartet env --for {{ .kind }} /etc/quartet/config/config.yaml)" || exit
    eval "$settings"
    ulimit -n 65536
    exec tini -- $KUBERAY_GEN_RAY_START_CMD
{{- end -}}
